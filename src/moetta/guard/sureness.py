"""How much surer the adapted model is than the source model, on the same images."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.core.functional import entropy
from moetta.guard.detectors import MEMORY

# From 1 to 8 in steps of a quarter of an octave: finer than what a weight is needed for.
TEMPERATURES = 2.0 ** (torch.arange(13, dtype=torch.float64) / 4)


class Sureness:
    """The temperature at which the adapted model is as sure as the source model.

    Learning makes predictions surer, right or wrong: that is what entropy minimisation minimises.
    So the sureness that was gained is no evidence, and is taken out: at this temperature both
    models have the same mean entropy.

    Attributes:
        sums: decaying sums over the looks: the source model's mean entropy, and the adapted model's
            at each temperature.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(1 + len(TEMPERATURES), dtype=torch.float64)

    @staticmethod
    def measure(source_logits: Tensor, adapted_logits: Tensor) -> Tensor:
        """Entropies per image, one column for each of ``sums``."""
        columns = [entropy(source_logits), *(entropy(adapted_logits / t) for t in TEMPERATURES)]
        return torch.stack([c.double() for c in columns], 1)

    def add(self, measured: Tensor) -> None:
        """Take the rows of one look."""
        self.sums = (1 - 1 / MEMORY) * self.sums + measured.mean(0)

    @property
    def temperature(self) -> float:
        """At least 1: a model that is less sure than the source model is taken at its word."""
        source, entropies = self.sums[0], self.sums[1:]
        if entropies[0] >= source:
            return 1.0
        above = int((entropies < source).sum())  # entropy rises with the temperature
        if above == len(TEMPERATURES):
            return float(TEMPERATURES[-1])
        low, high = entropies[above - 1], entropies[above]
        part = float((source - low) / (high - low))
        return float(TEMPERATURES[above - 1] ** (1 - part) * TEMPERATURES[above] ** part)
