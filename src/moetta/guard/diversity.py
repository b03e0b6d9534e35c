"""How diverse the traffic is: in the latest look, and in the long run."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.guard.detectors import MEMORY

# Looks that the long run remembers.
LONG_RUN = 20 * MEMORY
# Below this share of the usual diversity, more of a look is a burst than is ordinary traffic. Looks
# of ordinary traffic vary too, and are not to change what is learnt.
BURST = 0.5


class Diversity:
    """Compares the classes in the latest look with those of the traffic so far.

    What is learnt from a burst of one class is a habit that is wrong for the next one. Diversity is
    the chance that two images are of different classes, by the source model's answers: nearly 1 in
    ordinary traffic, even from a few of many classes, and nearly 0 in a burst of one class.

    Args:
        classes: C.
        size: images in a look.

    Attributes:
        latest: the diversity of the latest look.
        counts: decaying counts of each class.
    """

    def __init__(self, classes: int, size: int) -> None:
        # What is not known yet is taken to be balanced: as many imagined images as MEMORY looks.
        self._imagined = MEMORY * size / classes
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.latest = 1.0

    def add(self, source: Tensor) -> None:
        """Take the source model's answers in one look."""
        new = torch.bincount(source, minlength=len(self.counts)).double()
        pairs = len(source) * (len(source) - 1)
        # No image is paired with itself, so that small looks are not taken for bursts.
        self.latest = 1 - float((new * (new - 1)).sum()) / pairs if pairs else 1.0
        self.counts = (1 - 1 / LONG_RUN) * self.counts + new

    @property
    def share(self) -> float:
        """The latest diversity relative to that of the long run in a burst; 1 in other traffic."""
        counts = self.counts + self._imagined
        usual = 1 - float((counts / counts.sum()).square().sum())
        return self.latest / usual if self.latest < BURST * usual else 1.0
