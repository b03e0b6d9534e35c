"""Ice for the frost corruption: procedural sheets, or the six original photographs."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from moetta.data.corruptions.rng import Streams

PHOTOGRAPHS: tuple[str, ...] = (
    "frost1.png",
    "frost2.png",
    "frost3.png",
    "frost4.jpg",
    "frost5.jpg",
    "frost6.jpg",
)
SHEETS = 5  # as many as the original draws from: it never picks its sixth photograph
_SIDE = 512
_REACH = 56  # half the length of the longest crystal, in pixels


@lru_cache(maxsize=4)
def ice(folder: Path | None, small: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Sheets of ice, uint8 [3, H, W] each; `small` takes every fifth pixel, for 32-px images.

    Raises:
        FileNotFoundError: If `folder` lacks one of the six photographs.
    """
    sheets = tuple(_sheet(i) for i in range(SHEETS)) if folder is None else _photographs(folder)
    # Linear interpolation by exactly 1/5 reads the middle one of five pixels.
    step = 5 if small else 1
    return tuple(s[:, step // 2 :: step, step // 2 :: step].to(device) for s in sheets)


def check_folder(folder: Path) -> None:
    """Refuse a folder without the six photographs."""
    missing = [name for name in PHOTOGRAPHS if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: frost_folder must hold ImageNet-C's six frost "
            f"photographs ({', '.join(PHOTOGRAPHS)}); leave it out to use the procedural ice"
        )


def _photographs(folder: Path) -> tuple[Tensor, ...]:
    check_folder(folder)
    sheets = []
    for name in PHOTOGRAPHS[:SHEETS]:
        with Image.open(folder / name) as photograph:
            array = np.array(photograph.convert("RGB"))
        sheets.append(torch.from_numpy(array).permute(2, 0, 1).contiguous())
    return tuple(sheets)


# The mean colour of each sheet and the spread around it, as in the photographs used.
_TINTS = (
    ((78, 149, 166), 20),
    ((201, 205, 214), 22),
    ((201, 205, 214), 22),
    ((138, 153, 165), 29),
    ((112, 123, 135), 43),
)


@lru_cache(maxsize=SHEETS)
def _sheet(number: int) -> Tensor:
    """One sheet of procedural ice, uint8 [3, side, side].

    Feathery crystals overlap on cloudy glass; the result is scaled to the sheet's mean colour and
    spread.
    """
    random = Streams.of(0, torch.tensor([number]), "ice", torch.device("cpu"))
    count = (400, 1800, 1800, 1000, 1300)[number]
    span, crystals = 2 * _REACH, _crystals()
    canvas = torch.zeros(_SIDE + 2 * span, _SIDE + 2 * span)
    places = random.integers(2 * count, _SIDE + span, 0).view(count, 2).tolist()
    kinds = random.integers(count, len(crystals), 1)[0].tolist()
    for (top, left), kind in zip(places, kinds, strict=True):
        window = canvas[top : top + span, left : left + span]
        torch.maximum(window, crystals[kind], out=window)
    relief = canvas[span : span + _SIDE, span : span + _SIDE]
    relief = relief / _spread(relief) + 0.5 * _clouds(random, 2, 160) + 0.3 * _clouds(random, 3, 20)
    relief = relief + 0.2 * random.normal(_SIDE * _SIDE, 4).view(_SIDE, _SIDE)
    relief = (relief - round(float(relief.double().mean()), 4)) / _spread(relief)
    tint, spread = _TINTS[number]
    levels = torch.tensor(tint, dtype=torch.float32).view(3, 1, 1) + spread * relief
    return levels.clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=1)
def _crystals(count: int = 160) -> Tensor:
    """float32 [count, n, n]: barbed spindles of random direction and length."""
    random = Streams.of(0, torch.tensor([0]), "crystals", torch.device("cpu"))
    angle = random.uniform(count, 0, 0, 2 * math.pi).view(-1, 1, 1)
    length = random.uniform(count, 1, 12, _REACH).view(-1, 1, 1)
    light = random.uniform(count, 2, 0.4, 1).view(-1, 1, 1)
    x = torch.arange(-_REACH, _REACH, dtype=torch.float32)
    y = x[:, None]
    along = x * angle.cos() + y * angle.sin()
    across = (y * angle.cos() - x * angle.sin()).abs()
    body = (1 - (along.abs() + 4 * across) / length).clamp(min=0).sqrt()
    barbs = 0.65 + 0.35 * torch.sin(0.9 * along + 1.4 * across)
    return light * body * (barbs + torch.exp(-0.8 * across))


def _spread(values: Tensor) -> float:
    """Standard deviation, rounded so that the order of summing, which threads change, is moot."""
    return round(float(values.double().std()), 4)


def _clouds(random: Streams, draw: int, scale: int) -> Tensor:
    """Smooth noise [side, side] of about unit variance, varying over `scale` pixels."""
    coarse = _SIDE // scale + 2
    noise = random.normal(coarse * coarse, draw).view(1, 1, coarse, coarse)
    return F.interpolate(noise, size=(_SIDE, _SIDE), mode="bicubic", align_corners=True)[0, 0]
