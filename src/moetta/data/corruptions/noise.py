"""Gaussian, shot, impulse and speckle noise."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moetta.data.corruptions.core import Job, to_bytes


def _normal_like(images: Tensor, job: Job) -> Tensor:
    return job.streams.normal(images[0].numel()).view(images.shape)


def gaussian_noise(images: Tensor, job: Job) -> Tensor:
    """Add normal noise with the same standard deviation everywhere."""
    return to_bytes(_normal_like(images, job).mul_(255 * job.setting).add_(images))


def speckle_noise(images: Tensor, job: Job) -> Tensor:
    """Add normal noise in proportion to the value."""
    return to_bytes(_normal_like(images, job).mul_(job.setting).add_(1).mul_(images))


def impulse_noise(images: Tensor, job: Job) -> Tensor:
    """Replace a share of the values by black or white, in each channel separately."""
    bits = job.streams.bits(images[0].numel()).view(images.shape)
    # Signed 32-bit numbers are uniform around 0: the lower tail is black, the upper tail white.
    share = job.setting / 2
    low, high = round(share * 2**32) - 2**31, 2**31 - round(share * 2**32)
    black, white = images.new_tensor(0), images.new_tensor(255)
    return torch.where(bits < low, black, torch.where(bits >= high, white, images))


def shot_noise(images: Tensor, job: Job) -> Tensor:
    """Draw each value from a Poisson distribution around it, counted in a few photons."""
    photons = int(job.setting)
    accept, levels = _photon_tables(photons, images.device)
    columns = accept.numel() // 256
    bits = job.streams.bits(images[0].numel()).view(-1)
    cell = (bits & (columns - 1)).add_(images.reshape(-1).to(torch.int32), alpha=columns)
    # Walker's alias method: a cell holds two outcomes; the remaining bits choose between them.
    second = bits >= accept.index_select(0, cell)
    return levels.index_select(0, cell.mul_(2).add_(second)).view(images.shape)


@lru_cache(maxsize=16)
def _photon_tables(photons: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Alias tables of 256 Poisson distributions, one per pixel value.

    All counts from `photons` up are white, so they count as one outcome. Returns the threshold of
    each cell, int32 [256 * columns], and its two outcomes as levels, uint8 [2 * 256 * columns].
    """
    columns = 1 << photons.bit_length()
    rate = np.arange(256)[:, None] / 255 * photons
    count = np.arange(photons)
    log_factorial = np.cumsum(np.log(np.maximum(count, 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_rate = np.where(rate > 0, np.log(rate), -np.inf)
        below = np.exp(np.where(count > 0, count * log_rate, 0) - rate - log_factorial)
    chance = np.zeros((256, columns))
    chance[:, :photons] = below
    chance[:, photons] = np.maximum(0, 1 - below.sum(1))
    chance /= chance.sum(1, keepdims=True)

    keep, alias = _alias(chance)
    level = np.floor(np.minimum(np.arange(columns) / photons, 1) * 255 + 1e-9).astype(np.uint8)
    outcomes = np.stack([np.broadcast_to(level, alias.shape), level[alias]], axis=-1)
    # The column used the low bits, so comparing whole words uses 32 - log2(columns) fresh bits.
    threshold = np.clip(np.rint(keep * 2.0**32) - 2.0**31, -(2**31), 2**31 - 1).astype(np.int32)
    return (
        torch.from_numpy(threshold.reshape(-1)).to(device),
        torch.from_numpy(outcomes.reshape(-1).copy()).to(device),
    )


def _alias(chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vose's tables for each row of probabilities: what a cell keeps, and which gets the rest."""
    rows, columns = chance.shape
    keep = np.ones((rows, columns))
    alias = np.tile(np.arange(columns), (rows, 1))
    for row in range(rows):
        rest = chance[row] * columns
        small = [j for j in range(columns) if rest[j] < 1]
        large = [j for j in range(columns) if rest[j] >= 1]
        while small and large:
            poor, rich = small.pop(), large[-1]
            keep[row, poor], alias[row, poor] = rest[poor], rich
            rest[rich] -= 1 - rest[poor]
            if rest[rich] < 1:
                small.append(large.pop())
    return keep, alias
