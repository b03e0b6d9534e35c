"""Tent: minimise the entropy of every prediction through the norm layers (Wang et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from moetta.core.adapter import Step
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.methods.norm_affine import NormAffineAdapter, SGDConfig
from moetta.methods.registry import register


@dataclass(frozen=True)
class TentConfig(SGDConfig):
    """Tent.

    Attributes:
        seed: not used.
        lr: learning rate.
        momentum: momentum of the SGD.
    """

    lr: float = 5e-4


class Tent(NormAffineAdapter):
    """Entropy minimisation over the whole batch."""

    def learn(self, inputs: Inputs) -> Step:
        """One step down the mean entropy."""
        logits = inputs.logits(self.model)
        entropies = entropy(logits)
        loss = entropies.mean()
        skipped = self.descend(loss)
        return Step(
            logits,
            forwards=len(inputs),
            backwards=0 if skipped else len(inputs),
            entropy=entropies,
            losses={"entropy": loss},
            skipped=skipped,
        )


register("tent", TentConfig, Tent, "entropy minimisation on all samples")
