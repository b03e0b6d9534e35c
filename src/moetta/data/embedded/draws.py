"""Random numbers that depend on (seed, image, position), so an image's are the same in any batch.

Separate from the corruptions' generator on purpose: the shipped weights depend on these draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift; torch's keeps the sign


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in wrapping int64."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def uniforms(seed: int, index: Tensor, count: int, stream: int = 0) -> Tensor:
    """``count`` uniform draws in [0, 1) for each image: float32 [B, count].

    Args:
        seed: The data set's seed.
        index: The images' numbers, integer [B].
        count: Draws per image; asking for more does not change the first ones.
        stream: Separates draws for different purposes.
    """
    salt = torch.tensor([seed, stream], dtype=torch.int64)
    key = _mix(_mix(_mix(salt[:1] + _GOLDEN) + salt[1:]) + index.to(torch.int64) * _GOLDEN)
    bits = _mix(key[:, None] + (1 + torch.arange(count)) * _GOLDEN)
    return _shift(bits, 40).to(torch.float32) / 2**24
