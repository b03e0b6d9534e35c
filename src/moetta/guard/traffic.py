"""What kind of traffic it is, as far as the source model can tell."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Looks that it remembers, and from how many on it says anything. Traffic may change quickly.
MEMORY = 16
FEWEST = 8
# Traffic is narrow if the sure answers have less than half as many classes as the doubtful ones,
# and stays so until they have two thirds: it should not change with every look.
ENTER, LEAVE = math.log(2), math.log(1.5)


class Traffic:
    """Whether the images are of few classes: of one only, or one class after another.

    A model spreads its errors over many classes where the images are of few, and drives them into
    few where the images are of many. Its sure answers are mostly right, so they tell which.

    Attributes:
        counts: decaying counts [2, C] of the source model's answers: its surer half in each look,
            and the other.
        looks: looks so far.
        narrow: whether the images are of few classes.
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(2, classes, dtype=torch.float64)
        self.looks = 0
        self.narrow = False

    def add(self, answers: Tensor, sure: Tensor) -> None:
        """Take one look: the source model's answers and its confidence in them."""
        order = answers[sure.argsort(descending=True)]
        half = len(order) // 2
        self.counts *= 1 - 1 / MEMORY
        for row, part in zip(self.counts, (order[:half], order[len(order) - half :]), strict=True):
            row += torch.bincount(part, minlength=len(row))
        self.looks += 1
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp_min(1)
        surer, other = (-torch.xlogy(shares, shares).sum(1)).tolist()
        margin = LEAVE if self.narrow else ENTER
        self.narrow = self.looks >= FEWEST and surer < other - margin
