"""Snow, frost and fog."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moetta.data.corruptions import filters, textures
from moetta.data.corruptions.core import Job, to_bytes

GREY = (0.299, 0.587, 0.114)


def snow(images: Tensor, job: Job) -> Tensor:
    """Whiten the image and add flakes falling in a random direction, and the same flakes turned."""
    mean, deviation, factor, threshold, radius, sigma, kept = job.setting
    batch, _, height, width = images.shape
    # Only the middle of the noise would be seen, so only that is drawn.
    inner = (math.ceil(height / factor), math.ceil(width / factor))
    noise = job.streams.normal(inner[0] * inner[1]).view(batch, 1, *inner)
    flakes = filters.zoom(noise.mul_(deviation).add_(mean), factor, (height, width))
    flakes = torch.where(flakes < threshold, 0, flakes)
    # The original stores the layer as bytes before and after the blur.
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
    """Lay a random part of a random sheet of ice over the image."""
    keep, add = job.setting
    height, width = images.shape[-2:]
    sheets = textures.ice(job.frost_folder, job.preset == "cifar", images.device)
    pick = job.streams.integers(1, len(sheets), draw=0)[:, 0].tolist()
    parts = job.streams.uniform(2, draw=1).tolist()
    levels = images * float(keep)
    for level, number, (down, right) in zip(levels, pick, parts, strict=True):
        sheet = _at_least(sheets[number], height + 1, width + 1)
        top = int(down * (sheet.shape[1] - height))
        left = int(right * (sheet.shape[2] - width))
        level.add_(sheet[:, top : top + height, left : left + width], alpha=add)
    return to_bytes(levels)


def _at_least(sheet: Tensor, height: int, width: int) -> Tensor:
    """Enlarge a sheet that is too small for the image, keeping its proportions."""
    factor = max(height / sheet.shape[1], width / sheet.shape[2])
    if factor <= 1:
        return sheet
    size = (math.ceil(sheet.shape[1] * factor), math.ceil(sheet.shape[2] * factor))
    large = F.interpolate(sheet[None].float(), size=size, mode="bilinear", align_corners=False)
    return large[0].to(torch.uint8)


def fog(images: Tensor, job: Job) -> Tensor:
    """Mix in a cloudy grey; the brightest value of the image stays as it is."""
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
    amplitude = 100.0
    while grid.shape[-1] < side:
        n = grid.shape[-1]
        # The n * n points of the grid have used their noise; the 3 * n * n new ones take the next.
        jitter = noise[:, n * n : 4 * n * n].view(-1, 3, n, n) * amplitude**2
        fine = grid.new_empty(len(grid), n, 2, n, 2)
        corner, right, below, centre = (fine[:, :, y, :, x] for y in (0, 1) for x in (0, 1))
        corner.copy_(grid)
        pairs = grid + grid.roll(-1, 1)
        centre.copy_((pairs + pairs.roll(-1, 2)).mul_(0.25).add_(jitter[:, 0]))
        across = grid + grid.roll(-1, 2)
        right.copy_(across.add_(centre).add_(centre.roll(1, 1)).mul_(0.25).add_(jitter[:, 1]))
        below.copy_(pairs.add_(centre).add_(centre.roll(1, 2)).mul_(0.25).add_(jitter[:, 2]))
        grid = fine.view(-1, 2 * n, 2 * n)
        amplitude /= decay
    low, high = grid.amin((1, 2), keepdim=True), grid.amax((1, 2), keepdim=True)
    return grid.sub_(low).div_(high - low)
