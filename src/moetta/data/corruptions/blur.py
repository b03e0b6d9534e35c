"""Defocus, glass, motion, zoom and Gaussian blur."""

import numpy as np
import torch
from torch import Tensor

from moetta.data.corruptions import filters
from moetta.data.corruptions.core import Job, to_bytes


def gaussian_blur(images: Tensor, job: Job) -> Tensor:
    """Blur with a Gaussian."""
    return to_bytes(filters.gaussian(images.float(), job.setting))


def defocus_blur(images: Tensor, job: Job) -> Tensor:
    """Blur with a disk, as a lens out of focus does."""
    return to_bytes(filters.disk_blur(images.float(), *job.setting))


def motion_blur(images: Tensor, job: Job) -> Tensor:
    """Smear along a random direction within 45 degrees of the horizontal."""
    angles = job.streams.uniform(1, low=-45, high=45)[:, 0].tolist()
    return to_bytes(filters.motion(images.float(), *job.setting, angles))


def zoom_blur(images: Tensor, job: Job) -> Tensor:
    """Average over a range of enlargements."""
    stop, step = job.setting
    factors = np.arange(1, stop, step).tolist()
    levels = images.float()
    total = levels.clone()
    for factor in factors:
        total += filters.crop_and_zoom(levels, factor)
    return to_bytes(total.div_(len(factors) + 1))


def glass_blur(images: Tensor, job: Job) -> Tensor:
    """Blur, replace every pixel by a random near one, blur again."""
    sigma, reach, rounds = job.setting
    batch, channels, height, width = images.shape
    soft = to_bytes(filters.gaussian(images.float(), sigma))
    source: Tensor | None = None
    for turn in range(rounds):
        origin = _glass_sources(job, turn, reach, height, width)
        # A later round reads the picture that the earlier ones left.
        source = origin if source is None else source.gather(1, origin)
    assert source is not None
    pixels = soft.view(batch, channels, -1)
    mixed = torch.stack([p[:, s] for p, s in zip(pixels, source, strict=True)])
    return to_bytes(filters.gaussian(mixed.view_as(images).float(), sigma))


def _glass_sources(job: Job, turn: int, reach: int, height: int, width: int) -> Tensor:
    """int64 [B, H*W]: the pixel whose colour each pixel has after one round.

    The original walks the picture from its last pixel to its first and lets each take the colour
    that a random near pixel has at that moment (it means to swap, but assigns through views, so
    that the near pixel keeps its own). The colour is the near pixel's old one if the walk has not
    passed there yet, else the one it took itself: a chain that always leads to a later pixel, and
    ends at an old colour. All chains are followed at once by doubling: about log2 of the longest.
    """
    count = height * width
    bits = job.streams.bits(count, draw=turn)
    span = 2 * reach
    shift_y = ((bits & 0xFFFF) * span >> 16) - reach
    shift_x = ((bits >> 16 & 0xFFFF) * span >> 16) - reach
    place = torch.arange(count, device=bits.device).view(height, width)
    walked = torch.zeros(height, width, dtype=torch.bool, device=bits.device)
    walked[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    walked, place = walked.view(-1), place.view(-1)
    near = torch.where(walked, place + shift_y * width + shift_x, place)
    open_ = (near > place) & walked[near]
    # Old colours are the nodes count .. 2 * count - 1, each its own successor.
    follow = torch.cat([torch.where(open_, near, near + count), (place + count).expand_as(near)], 1)
    while bool((follow[:, :count] < count).any()):
        follow[:, :count] = follow.gather(1, follow[:, :count])
    return follow[:, :count] - count
