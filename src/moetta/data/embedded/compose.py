"""Composes two-digit numbers from scikit-learn's handwritten digits: 100 classes, 32 x 32, RGB.

The 1,797 digits are split before anything is composed, so no stroke of a test image was seen in
training. An image depends only on (split, seed, index).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.data.embedded.draws import uniforms

SIZE = 32
CLASSES = 100
TEST_SHARE = 0.4
_LUMA = (0.299, 0.587, 0.114)


@cache
def digits(split: str) -> tuple[Tensor, Tensor, Tensor]:
    """The digits of a split, sorted by class: images [N, 8, 8] in 0..1, class starts and counts."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the embedded benchmark needs scikit-learn's digits: pip install 'moetta[bench]'"
        ) from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32) / 16
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    chosen, counts = [], []
    for digit in range(10):
        members = torch.nonzero(labels == digit).flatten()
        # Shuffled within each class, since the file lists one writer after another.
        order = members[uniforms(1797, members, 1, stream=9).flatten().argsort()]
        cut = round(TEST_SHARE * len(order))
        part = order[:cut] if split == "test" else order[cut:]
        chosen.append(part)
        counts.append(len(part))
    count = torch.tensor(counts)
    return images[torch.cat(chosen)], count.cumsum(0) - count, count


@dataclass(frozen=True)
class Scene:
    """What an image shows before it is painted; everything that the styles need."""

    ink: Tensor
    """[B, 1, H, W]: how much ink is on each pixel, 0..1, soft at the edges."""
    labels: Tensor
    """[B]: 10 x left digit + right digit."""
    index: Tensor
    seed: int


def number_labels(index: Tensor, seed: int) -> Tensor:
    """The number that each image shows, which is its class: int64 [B]."""
    return (uniforms(seed, index, 1, stream=1)[:, 0] * CLASSES).long()


def scene(index: Tensor, *, split: str, seed: int) -> Scene:
    """Chooses two digits for each image and lays them out, without colours."""
    images, starts, counts = digits(split)
    u = uniforms(seed, index, 24, stream=1)
    labels = number_labels(index, seed)
    which = torch.stack((labels // 10, labels % 10), 1)  # [B, 2]
    sample = starts[which] + (u[:, 1:3] * counts[which]).long()
    glyphs = images[sample.flatten()][:, None]  # [2B, 1, 8, 8]

    def spread(first: int, low: float, high: float) -> Tensor:
        """One draw per digit: [2B]."""
        return (low + (high - low) * u[:, first : first + 2]).flatten()

    count = len(index)
    centre_x = spread(3, -1.5, 1.5) + torch.tensor([9.5, 21.5]).repeat(count)
    centre_y = spread(5, -3.0, 3.0) + 15.5
    width, height = spread(7, 10.5, 13.5), spread(9, 15.0, 21.0)
    angle, shear = spread(11, -0.25, 0.25), spread(13, -0.2, 0.2)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    x = x[None] - centre_x[:, None, None]
    y = y[None] - centre_y[:, None, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    x, y = cos * x + sin * y, cos * y - sin * x
    x = x + shear[:, None, None] * y
    grid = torch.stack((2 * x / width[:, None, None], 2 * y / height[:, None, None]), -1)
    pen = F.grid_sample(glyphs, grid, mode="bicubic", align_corners=False, padding_mode="zeros")
    pen = pen.view(count, 2, SIZE, SIZE).amax(1, keepdim=True)
    threshold = (0.30 + 0.2 * u[:, 15]).view(-1, 1, 1, 1)
    sharpness = (7 + 8 * u[:, 16]).view(-1, 1, 1, 1)
    ink = torch.sigmoid((pen - threshold) * sharpness)
    floor = torch.sigmoid(-threshold * sharpness)  # no ink where there is no pen
    return Scene(((ink - floor) / (1 - floor)).clamp(0, 1), labels, index, seed)


def noise(view: Scene, cells: int, channels: int, stream: int) -> Tensor:
    """Smooth noise, about ``cells`` bumps across: [B, channels, H, W], roughly in -1..1."""
    draws = uniforms(view.seed, view.index, channels * cells * cells, stream)
    grid = draws.view(-1, channels, cells, cells) * 2 - 1
    return F.interpolate(grid, size=(SIZE, SIZE), mode="bicubic", align_corners=False)


def waves(frequency: Tensor, angle: Tensor, phase: Tensor) -> Tensor:
    """Sinusoidal stripes, [B, 1, H, W] in -1..1; ``frequency`` in periods across the image."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    frequency, angle, phase = (v.view(-1, 1, 1) for v in (frequency, angle, phase))
    along = (angle.cos() * x + angle.sin() * y) / SIZE
    return torch.sin(2 * math.pi * (frequency * along + phase))[:, None]


def colour(luma: Tensor, chroma: Tensor) -> Tensor:
    """Colours of a given brightness [B] and chroma offsets [B, 3]: [B, 3, 1, 1] in 0..1."""
    weights = torch.tensor(_LUMA)
    chroma = chroma - (chroma * weights).sum(1, keepdim=True)
    return (luma[:, None] + chroma).clamp(0, 1)[:, :, None, None]


def paint(view: Scene) -> Tensor:
    """The training style: dark strokes on a lighter, textured background, all coloured. Uint8.

    Brightness and contrast vary little, as in a studio. A model that has seen nothing else fails
    under other weather and lighting, and can adapt to them.
    """
    u = uniforms(view.seed, view.index, 24, stream=2)
    ground_luma = 0.5 + 0.22 * u[:, 0]
    ink_luma = ground_luma * (0.4 + 0.25 * u[:, 1])
    ground = colour(ground_luma, 0.3 * u[:, 3:6] - 0.15)
    stroke = colour(ink_luma, 0.3 * u[:, 6:9] - 0.15)

    def amount(column: int, high: float) -> Tensor:
        return (high * u[:, column] ** 2).view(-1, 1, 1, 1)

    tint = 0.6 + 0.4 * u[:, 9:12, None, None]
    stripes = waves(2 + 8 * u[:, 15], math.pi * u[:, 16], u[:, 17])
    texture = (
        amount(12, 0.15) * noise(view, 4, 1, stream=3)
        + amount(13, 0.12) * noise(view, 10, 1, stream=4)
        + amount(14, 0.10) * stripes
    )
    ground = ground + tint * texture
    stroke = stroke + amount(18, 0.12) * noise(view, 4, 3, stream=5)
    return to_uint8(ground + (stroke - ground) * view.ink)


def to_uint8(image: Tensor) -> Tensor:
    """Converts 0..1 to bytes."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def photographs(index: Tensor, *, split: str, seed: int) -> tuple[Tensor, Tensor]:
    """Clean images in the training style, and their labels."""
    view = scene(index, split=split, seed=seed)
    return paint(view), view.labels
