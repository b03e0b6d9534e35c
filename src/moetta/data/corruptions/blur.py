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
    radius, sigma = job.setting
    return to_bytes(filters.motion(images.float(), radius, sigma, angles))


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
    """Blur, replace each pixel by a random neighbour, blur again."""
    sigma, reach, rounds = job.setting
    soft = to_bytes(filters.gaussian(images.float(), sigma))
    source = _glass_sources(job, 0, reach, soft.shape)
    for turn in range(1, rounds):
        # Each round reads the image that the one before it left.
        source = source.index_select(0, _glass_sources(job, turn, reach, soft.shape))
    mixed = torch.empty(images.shape, device=images.device)
    for channel in range(images.shape[1]):
        plane = soft[:, channel].reshape(-1).index_select(0, source)
        mixed[:, channel] = plane.view_as(mixed[:, channel])
    return to_bytes(filters.gaussian(mixed, sigma))


def _glass_sources(job: Job, turn: int, reach: int, shape: torch.Size) -> Tensor:
    """int32 [B*H*W]: the pixel (numbered over the batch) whose colour each has after one round.

    The original goes through the image from the last pixel to the first and gives each the colour
    that a random neighbour has at that moment. (It means to swap the two, but assigns through
    views, so the neighbour keeps its colour.) That colour is the neighbour's old one if it has not
    been visited yet, else the one it took: a chain that always leads to later pixels and ends at
    an old colour. All chains are followed at once by doubling, in about log2(longest) steps.
    """
    batch, _, height, width = shape
    bits = job.streams.bits(height * width, draw=turn).view(batch, height, width)
    count = bits.numel()
    place = torch.arange(count, dtype=torch.int32, device=bits.device)
    inner = (
        slice(None),
        slice(reach + 1, height - reach + 1),
        slice(reach + 1, width - reach + 1),
    )
    walked = torch.zeros(bits.shape, dtype=torch.bool, device=bits.device)
    walked[inner] = True
    # Each half of the 32 bits gives a whole number in -reach .. reach - 1.
    word = bits[inner]
    shift = (((word >> 16) & 0xFFFF) * (2 * reach) >> 16) - reach
    shift.mul_(width).add_(((word & 0xFFFF) * (2 * reach) >> 16) - reach)
    near = place.clone()
    near.view(bits.shape)[inner] += shift
    # Old colours are the nodes count .. 2 * count - 1, each followed by itself.
    pending = (near > place).logical_and_(walked.view(-1).index_select(0, near))
    follow = torch.cat([torch.where(pending, near, near + count), place + count])
    chains = follow[:count]
    while int(chains.min()) < count:
        chains.copy_(follow.index_select(0, chains))
    return chains - count
