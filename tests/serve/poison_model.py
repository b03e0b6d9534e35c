"""A tiny model that fails on white images, for tests of what a failing batch does to others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Poisonable(nn.Module):
    """A classifier of 5 classes for 16 x 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        if bool((images.mean((1, 2, 3)) > 1.5).any()):
            raise RuntimeError("this batch is poisoned")
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.hidden(self.norm1(tokens)).relu()
        out: Tensor = self.head(self.norm2(tokens).mean(1))
        return out


def make() -> nn.Module:
    torch.manual_seed(0)
    return Poisonable().eval()
