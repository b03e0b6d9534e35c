"""Ice for the frost corruption: procedural sheets of our own, or the six original photographs."""

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


def ice(folder: Path | None, small: bool, device: torch.device) -> tuple[Tensor, ...]:
    """The ice pictures, uint8 [3, H, W] each; `small` takes every fifth pixel, for 32-px images.

    Raises:
        FileNotFoundError: If `folder` lacks one of the six photographs.
    """
    sheets = tuple(_sheet(i) for i in range(SHEETS)) if folder is None else _photographs(folder)
    # Shrinking by exactly five with linear interpolation reads the middle pixel of each five.
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
    return _read_photographs(folder.resolve())


@lru_cache(maxsize=2)
def _read_photographs(folder: Path) -> tuple[Tensor, ...]:
    check_folder(folder)
    pictures = []
    for name in PHOTOGRAPHS[:SHEETS]:
        with Image.open(folder / name) as picture:
            array = np.array(picture.convert("RGB"))
        pictures.append(torch.from_numpy(array).permute(2, 0, 1).contiguous())
    return tuple(pictures)


# Mean red, green and blue of each sheet and the spread around it: those of the photographs used.
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

    Crystals grow from random seeds, each with its own direction; a pixel belongs to the nearest
    seed. Within a crystal, needles branch off a spine like the barbs of a feather.
    """
    random = Streams.of(0, torch.tensor([number]), "ice", torch.device("cpu"))
    crystals = (60, 150, 220, 320, 180)[number]
    place = random.uniform(2 * crystals, 0, 0, _SIDE).view(crystals, 2)
    angle = random.uniform(crystals, 1, 0, 2 * math.pi)[0]
    tone = random.normal(crystals, 2)[0]
    axis = torch.arange(_SIDE, dtype=torch.float32)
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
    # Crooked borders between crystals: the pixel that asks is displaced a little.
    crooked = pixels + 14 * _clouds(random, 3, 24, 2).view(2, -1).T
    owner = torch.cdist(crooked, place).argmin(1)
    offset = pixels - place[owner]
    sine, cosine = angle.sin()[owner], angle.cos()[owner]
    along = offset[:, 0] * sine + offset[:, 1] * cosine
    across = (offset[:, 0] * cosine - offset[:, 1] * sine).abs()
    barbs = torch.sin(0.9 * along + 1.3 * across + 3 * _clouds(random, 4, 10, 1).view(-1))
    spine = torch.exp(-across / 3)
    grain = random.normal(_SIDE * _SIDE, 5)[0]
    light = 0.7 * tone[owner] + 0.8 * barbs * torch.exp(-across / 40) + 1.5 * spine + 0.35 * grain
    light = (
        light + 1.2 * _clouds(random, 6, 160, 1).view(-1) + 0.6 * _clouds(random, 7, 6, 1).view(-1)
    )
    light = (light - light.mean()) / light.std()
    tint, spread = _TINTS[number]
    levels = torch.tensor(tint, dtype=torch.float32).view(3, 1) + spread * light
    return levels.clamp_(0, 255).to(torch.uint8).view(3, _SIDE, _SIDE)


def _clouds(random: Streams, draw: int, scale: int, fields: int) -> Tensor:
    """Smooth noise [fields, side, side] of unit variance or so, varying over `scale` pixels."""
    coarse = _SIDE // scale + 2
    noise = random.normal(fields * coarse * coarse, draw).view(1, fields, coarse, coarse)
    return F.interpolate(noise, size=(_SIDE, _SIDE), mode="bicubic", align_corners=True)[0] * 1.3
