"""Small models for the tests: the families of `moetta.testing`, and a few more."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from moetta.testing.models import (
    CLASSES,
    FAMILIES,
    VIT,
    VIT_SIZES,
    Batch,
    Encoder,
    Family,
    call,
    enliven,
)

__all__ = [
    "CLASSES",
    "FAMILIES",
    "VIT",
    "Batch",
    "Encoder",
    "Family",
    "Perceptron",
    "call",
    "enliven",
    "images",
    "perceptron",
    "small_vit",
]


def small_vit(depth: int = 2, classes: int = CLASSES, seed: int = 0) -> VisionTransformer:
    """A fresh tiny timm ViT for the tests of numbers."""
    settings = {**VIT_SIZES, "depth": depth, "num_classes": classes}
    return enliven(VisionTransformer(**settings), seed).eval()


def images(size: int = 8, seed: int = 0, side: int = 16) -> Tensor:
    """Random images, the same for the same seed."""
    return torch.randn(size, 3, side, side, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """The smallest residual block that every method can work with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Perceptron(nn.Module):
    """Two blocks over the patches of a 16 x 16 image: quick to compile, quick to step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def perceptron() -> nn.Module:
    """A fresh `Perceptron`, the same every time."""
    return enliven(Perceptron()).eval()
