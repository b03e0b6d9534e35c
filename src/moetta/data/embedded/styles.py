"""Styles that no shipped model saw in training: renditions and outline drawings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.data.embedded.compose import SIZE, Scene, colour, noise, to_uint8, waves
from moetta.data.embedded.draws import uniforms


def _mix(below: Tensor, above: Tensor, share: Tensor) -> Tensor:
    return below + (above - below) * share


def _vivid(u: Tensor) -> Tensor:
    """Saturated colours from hues drawn in 0..1 [B]: [B, 3, 1, 1]."""
    offsets = torch.tensor([0.0, 1 / 3, 2 / 3])
    return (0.5 + 0.5 * torch.cos(2 * math.pi * (u[:, None] + offsets)))[:, :, None, None]


def _spread(ink: Tensor, radius: int) -> Tensor:
    return F.max_pool2d(ink, 2 * radius + 1, stride=1, padding=radius)


def _blur(x: Tensor, size: int) -> Tensor:
    return F.avg_pool2d(x, size, stride=1, padding=size // 2, count_include_pad=False)


def _halftone(view: Scene, u: Tensor) -> Tensor:
    """Printed dots: large ones for the strokes, small ones for the background."""
    dots = 0.5 + 0.25 * (
        waves(torch.full_like(u[:, 0], 8.0), 0.6 * u[:, 0], u[:, 1])
        + waves(torch.full_like(u[:, 0], 8.0), 0.6 * u[:, 0] + math.pi / 2, u[:, 2])
    )
    cover = torch.sigmoid(12 * (0.15 + 0.75 * view.ink - dots))
    return _mix(0.75 + 0.25 * _vivid(u[:, 3]), 0.5 * _vivid(u[:, 4]), cover)


def _hatched(view: Scene, u: Tensor) -> Tensor:
    """Strokes filled with stripes of two colours on a plain background."""
    stripes = torch.sigmoid(6 * waves(6 + 4 * u[:, 0], math.pi * u[:, 1], u[:, 2]))
    fill = _mix(_vivid(u[:, 3]), 0.5 * _vivid(u[:, 4]), stripes)
    ground = colour(torch.where(u[:, 5] < 0.5, 0.95, 0.05), torch.zeros(len(u), 3))
    return _mix(ground, fill, view.ink)


def _neon(view: Scene, u: Tensor) -> Tensor:
    """Glowing tubes at night."""
    glow = _blur(_blur(view.ink, 5), 5)
    core = (view.ink * (0.4 + 0.6 * _blur(view.ink, 3))) ** 2
    night = 0.06 + 0.05 * noise(view, 6, 3, stream=20)
    return night + 0.8 * glow * _vivid(u[:, 0]) + core * (0.6 + 0.4 * _vivid(u[:, 0]))


def _relief(view: Scene, u: Tensor) -> Tensor:
    """Embossed in stone: only light and shadow along the edges."""
    dx = F.pad(view.ink[..., 2:] - view.ink[..., :-2], (1, 1, 0, 0))
    dy = F.pad(view.ink[..., 2:, :] - view.ink[..., :-2, :], (0, 0, 1, 1))
    angle = (2 * math.pi * u[:, 0]).view(-1, 1, 1, 1)
    light = angle.cos() * dx + angle.sin() * dy
    stone = colour(0.4 + 0.25 * u[:, 1], 0.2 * u[:, 2:5] - 0.1)
    return stone + 0.4 * light + 0.06 * view.ink + 0.06 * noise(view, 16, 1, stream=21)


def _checkered(view: Scene, u: Tensor) -> Tensor:
    """A chessboard of pale squares with strokes of vivid ones."""
    cells = 3 + (3 * u[:, 0]).floor()
    board = waves(cells, torch.zeros_like(cells), u[:, 1]) * waves(
        cells, torch.full_like(cells, math.pi / 2), u[:, 2]
    )
    board = torch.sigmoid(10 * board)
    pale = _mix(0.8 + 0.2 * _vivid(u[:, 3]), 0.6 + 0.3 * _vivid(u[:, 4]), board)
    vivid = _mix(0.55 * _vivid(u[:, 5]), 0.35 * _vivid(u[:, 6]), board)
    return _mix(pale, vivid, view.ink)


def _sticker(view: Scene, u: Tensor) -> Tensor:
    """A cut-out with a white border on a mosaic of vivid tiles."""
    draws = uniforms(view.seed, view.index, 3 * 25, stream=22).view(-1, 3, 5, 5)
    tiles = F.interpolate(0.15 + 0.7 * draws, size=(SIZE, SIZE), mode="nearest")
    rim = _spread(view.ink, 1)
    return _mix(_mix(tiles, torch.ones(1), rim), 0.45 * _vivid(u[:, 0]), view.ink)


RENDITIONS = {
    "halftone": _halftone,
    "hatched": _hatched,
    "neon": _neon,
    "relief": _relief,
    "checkered": _checkered,
    "sticker": _sticker,
}


def rendition(view: Scene) -> Tensor:
    """Each image in one of the `RENDITIONS`, chosen at random. Uint8 [B, 3, H, W]."""
    u = uniforms(view.seed, view.index, 8, stream=6)
    chosen = (u[:, 7] * len(RENDITIONS)).long().view(-1, 1, 1, 1)
    out = torch.zeros(len(u), 3, SIZE, SIZE)
    for number, paint in enumerate(RENDITIONS.values()):
        out = torch.where(chosen == number, paint(view, u), out)
    return to_uint8(out)


def sketch(view: Scene) -> Tensor:
    """The outlines of the strokes in pencil on paper. Uint8 [B, 3, H, W]."""
    u = uniforms(view.seed, view.index, 4, stream=7)
    line = _spread(view.ink, 1) - view.ink  # one pixel wide, around the strokes
    pressure = 0.8 + 0.2 * noise(view, 6, 1, stream=23)
    paper = colour(0.86 + 0.12 * u[:, 0], torch.tensor([[0.02, 0.0, -0.03]]) * u[:, 1:2])
    paper = paper + 0.03 * noise(view, 16, 1, stream=24)
    graphite = (0.1 + 0.25 * u[:, 2]).view(-1, 1, 1, 1)
    return to_uint8(_mix(paper, graphite, line * pressure))
