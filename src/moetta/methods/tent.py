"""Tent: minimise the entropy of every prediction through the norm layers (Wang et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moetta.core.functional import UNCERTAINTIES
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register


@dataclass(frozen=True)
class TentConfig(SGDConfig):
    """Tent.

    Attributes:
        objective: the measure of uncertainty to minimise: the entropy of the prediction, or COME's
            entropy of an opinion ("come").
    """

    lr: float = 5e-4
    objective: Literal["entropy", "come"] = "entropy"


@register(
    "tent",
    TentConfig,
    title="Tent",
    summary="minimises the entropy of every prediction",
    group="entropy",
    citation=Citation(
        "Wang, Dequan and Shelhamer, Evan and Liu, Shaoteng and Olshausen, Bruno and "
        "Darrell, Trevor",
        "Tent: Fully Test-Time Adaptation by Entropy Minimization",
        "ICLR",
        2021,
    ),
    drawn=Drawn("#b8327d", "#f58cc5", "s"),
    cost="1 forward, 1 backward",
    paper_row=1,
)
class Tent(NormAffineAdapter[TentConfig]):
    """Entropy minimisation over the whole batch."""

    def objective(self, inputs: Inputs) -> Objective:
        """The mean entropy."""
        logits = self.predict(inputs)
        uncertainty = UNCERTAINTIES[self.config.objective](logits)
        return Objective(logits, {"entropy": uncertainty.mean()})
