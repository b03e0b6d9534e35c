"""No adaptation: the source model behind the same interface, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moetta.core.adapter import Adapter, Source, Step
from moetta.core.config import Config
from moetta.core.inputs import Inputs
from moetta.methods.registry import register


@dataclass(frozen=True)
class NoAdaptConfig(Config):
    """Nothing to set.

    Attributes:
        seed: not used.
    """


class NoAdapt(Adapter):
    """Predicts and learns nothing."""

    def build(self, source: Source) -> None:
        """Nothing is trained."""

    def learn(self, inputs: Inputs) -> Step:
        """One forward pass."""
        with torch.inference_mode():
            return Step(inputs.logits(self.model), forwards=len(inputs))


register("noadapt", NoAdaptConfig, NoAdapt, "the source model, unchanged")
