"""Which images the source model classifies too."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.guard.config import GuardConfig


class Sampler:
    """Draws the images to look at: all of them on probation, a small share in good times.

    Attributes:
        credit: images that may be sampled by now and have not been.
        probation: images that are still looked at one and all.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        self.restart()

    def restart(self) -> None:
        """Begin a new probation."""
        self.credit = 0.0
        self.probation = self._options.probation

    def choose(self, size: int, step: int, suspicious: bool) -> Tensor:
        """Positions in a batch: a function of (seed, step), of the batch sizes, and of suspicion.

        Args:
            size: images in the batch.
            step: number of the call.
            suspicious: look at every image.
        """
        count = size
        if self.probation <= 0 and not suspicious:
            most = float(min(size, self._options.sample))
            self.credit = min(self.credit + size * self._options.share, most)
            count = int(self.credit)
            self.credit -= count
        self.probation = max(0, self.probation - size)
        seed = (self._options.seed * 1_000_003 + step) * 1_009 + 907
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        return torch.randperm(size, generator=generator)[:count]
