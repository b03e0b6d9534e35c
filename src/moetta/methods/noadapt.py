"""No adaptation: the source model behind the same interface, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective
from moetta.methods.registry import Drawn, register


@dataclass(frozen=True)
class NoAdaptConfig(Config):
    """Nothing to set.

    Attributes:
        seed: not used.
    """


@register(
    "noadapt",
    NoAdaptConfig,
    title="No adaptation",
    summary="the source model, unchanged",
    group="baseline",
    drawn=Drawn("#6b7077", "#a3a9b3", "o", ":"),
    needs="nothing",
    cost="1 forward",
    paper_row=0,
)
class NoAdapt(Adapter[NoAdaptConfig]):
    """Predicts and learns nothing."""

    def build(self, source: Source) -> None:
        """Nothing is trained."""

    def objective(self, inputs: Inputs) -> Objective:
        """Nothing to minimise."""
        with torch.inference_mode():
            return Objective(self.predict(inputs))
