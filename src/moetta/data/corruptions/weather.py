"""Snow, frost and fog."""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from moetta.data.corruptions import filters, textures
from moetta.data.corruptions.core import Job, to_bytes

GREY = (0.299, 0.587, 0.114)


def snow(images: Tensor, job: Job) -> Tensor:
    """Whiten the picture and add flakes that fall in a random direction, and their mirror image."""
    mean, deviation, factor, threshold, radius, sigma, kept = job.setting
    batch, _, height, width = images.shape
    # Only the middle of the noise is enlarged, so only that much is drawn.
    inner = (math.ceil(height / factor), math.ceil(width / factor))
    noise = job.streams.normal(inner[0] * inner[1]).view(batch, 1, *inner)
    flakes = filters.zoom(noise.mul_(deviation).add_(mean), factor, (height, width))
    flakes = torch.where(flakes < threshold, 0, flakes)
    # Layers are stored as bytes before and after the smear.
    flakes = to_bytes(flakes.mul_(255)).float()
    angles = job.streams.uniform(1, draw=1, low=-135, high=-45)[:, 0].tolist()
    flakes = filters.motion(flakes, radius, sigma, angles).add_(0.5).floor_()
    levels = images.float()
    red, green, blue = levels.unbind(1)
    grey = (GREY[0] * red + GREY[1] * green + GREY[2] * blue).mul_(1.5).add_(0.5 * 255)
    paler = torch.maximum(levels, grey[:, None]).mul_(1 - kept)
    flakes = flakes + flakes.flip(-1, -2)
    return to_bytes(paler.add_(levels, alpha=kept).add_(flakes))


def frost(images: Tensor, job: Job) -> Tensor:
    """Lay a random part of a random sheet of ice over the picture."""
    keep, add = job.setting
    height, width = images.shape[-2:]
    sheets = textures.ice(job.frost_folder, job.preset == "cifar", images.device)
    sheets = tuple(_at_least(sheet, height + 1, width + 1) for sheet in sheets)
    pick = job.streams.integers(1, len(sheets), draw=0)[:, 0].tolist()
    parts = job.streams.uniform(2, draw=1).tolist()
    levels = images * float(keep)
    for level, number, (down, right) in zip(levels, pick, parts, strict=True):
        sheet = sheets[number]
        top = int(down * (sheet.shape[1] - height))
        left = int(right * (sheet.shape[2] - width))
        level.add_(sheet[:, top : top + height, left : left + width], alpha=add)
    return to_bytes(levels)


def _at_least(sheet: Tensor, height: int, width: int) -> Tensor:
    """Enlarge ice that is too small for the picture, keeping its proportions."""
    factor = max(height / sheet.shape[1], width / sheet.shape[2])
    if factor <= 1:
        return sheet
    size = (math.ceil(sheet.shape[1] * factor), math.ceil(sheet.shape[2] * factor))
    large = F.interpolate(sheet[None].float(), size=size, mode="bilinear", align_corners=False)
    return large[0].to(torch.uint8)


def fog(images: Tensor, job: Job) -> Tensor:
    """Mix in a cloudy grey; the picture's brightest value stays the brightest."""
    density, decay = job.setting
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    mist = _plasma(job, side, decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True).float()
    levels = images + mist.mul(255 * density)
    return to_bytes(levels.mul_(brightest / (brightest + 255 * density)))


def _plasma(job: Job, side: int, decay: float) -> Tensor:
    """Diamond-square clouds on a torus, scaled to 0 .. 1: [B, side, side]."""
    noise = job.streams.uniform(side * side, low=-1, high=1)
    grid = torch.zeros(len(noise), 1, 1, device=noise.device)
    used, amplitude = 0, 100.0
    while grid.shape[-1] < side:
        n = grid.shape[-1]

        def rough(mean: Tensor, part: int, used: int = used, n: int = n) -> Tensor:
            start = used + part * n * n
            jitter = noise[:, start : start + n * n].view(-1, n, n)
            return mean.mul_(0.25).add_(jitter, alpha=amplitude**2)

        pairs = grid + grid.roll(-1, 1)
        centre = rough(pairs + pairs.roll(-1, 2), 0)
        top = rough((centre + centre.roll(1, 1)).add_(grid).add_(grid.roll(-1, 2)), 1)
        side_ = rough((centre + centre.roll(1, 2)).add_(grid).add_(grid.roll(-1, 1)), 2)
        rows = torch.stack([torch.stack([grid, top], -1), torch.stack([side_, centre], -1)], 2)
        grid = rows.view(-1, 2 * n, 2 * n)
        used += 3 * n * n
        amplitude /= decay
    low, high = grid.amin((1, 2), keepdim=True), grid.amax((1, 2), keepdim=True)
    return grid.sub_(low).div_(high - low)
