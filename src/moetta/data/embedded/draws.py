"""Random numbers addressed by (seed, sample, position): any batch gives a sample the same ones.

Kept apart from the corruptions' generator on purpose: shipped weights depend on these draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # logical; torch's own shift keeps the sign


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in wrapping int64."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def uniforms(seed: int, index: Tensor, count: int, stream: int = 0) -> Tensor:
    """``count`` uniform draws in [0, 1) for each sample of ``index``: float32 [B, count].

    Args:
        seed: Of the whole data set.
        index: Integer [B]; a sample's number.
        count: How many draws a sample needs; asking for more never changes the first ones.
        stream: Separates draws made for different purposes.
    """
    salt = torch.tensor([seed, stream], dtype=torch.int64)
    key = _mix(_mix(_mix(salt[:1] + _GOLDEN) + salt[1:]) + index.to(torch.int64) * _GOLDEN)
    bits = _mix(key[:, None] + (1 + torch.arange(count)) * _GOLDEN)
    return _shift(bits, 40).to(torch.float32) / 2**24
