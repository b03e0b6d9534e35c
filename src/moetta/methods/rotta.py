"""RoTTA: a balanced memory of recent samples, and a slow teacher (Yuan et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import positive, require, share
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.core.pixels import PixelConfig, Pixels
from moetta.methods.registry import Citation, Drawn, register

FREE = -1


@dataclass(frozen=True)
class RoTTAConfig(PixelConfig, SGDConfig):
    """RoTTA. It steps by Adam, not by SGD.

    Attributes:
        seed: seed of the augmentation.
        momentum: not used.
        memory: how many samples are kept, and after how many new ones a step is made.
        decay: how much of its weights the teacher keeps at each step.
        statistics: share of the batch in the statistics of BatchNorm layers.
    """

    lr: float = 1e-3
    memory: int = 64
    decay: float = 0.999
    statistics: float = 0.05

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "memory")
        share(self, "decay", "statistics")
        require(self.memory >= 1, f"memory must be at least 1, got {self.memory}")
