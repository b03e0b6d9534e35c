"""Random numbers that depend on the image, not on its batch.

A counter-based generator: number n of draw d of image i is a hash of (seed, i, name, d, n). It has
no state, so the batch, the order, the number of workers and the device cannot matter. It uses only
32-bit integer arithmetic on whole tensors, which is the same on every device.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _mix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, on uint64, which wraps around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def _xorshift32_(x: Tensor, scratch: Tensor, bits: int) -> Tensor:
    torch.bitwise_right_shift(x, bits, out=scratch)
    scratch &= (1 << (32 - bits)) - 1
    return x.bitwise_xor_(scratch)


@lru_cache(maxsize=32)
def _counters(n: int, device: torch.device) -> Tensor:
    """0 .. n-1, spread over the 32-bit range by an odd multiplier."""
    return torch.arange(n, dtype=torch.int32, device=device) * _signed32(0x9E3779B9)


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Streams:
    """One random stream per image of a batch; `draw` numbers the independent uses of a stream."""

    keys: np.ndarray  # uint64 [B]
    device: torch.device

    @classmethod
    def of(cls, seed: int, index: Tensor, name: str, device: torch.device) -> "Streams":
        """The streams of the images numbered `index` (int64 [B]) for the corruption `name`."""
        base = np.full(len(index), (_word(name) + seed * 0x9E3779B97F4A7C15) & _MASK64, np.uint64)
        return cls(_mix64(_mix64(base) + index.cpu().numpy().view(np.uint64)), device)

    def __len__(self) -> int:
        return len(self.keys)

    def narrow(self, start: int, stop: int) -> "Streams":
        """The streams of images start .. stop-1."""
        return Streams(self.keys[start:stop], self.device)

    def bits(self, n: int, draw: int = 0) -> Tensor:
        """int32 [B, n]: 32 random bits each."""
        key = _mix64(self.keys + np.uint64((draw + 1) * 0xD1342543DE82EF95 & _MASK64))
        halves = torch.from_numpy(key.astype("<u8").view("<i4").reshape(-1, 2)).to(self.device)
        low, high = halves[:, :1], halves[:, 1:]
        x = _counters(n, self.device) + low
        scratch = torch.empty_like(x)
        _xorshift32_(x, scratch, 16).mul_(0x7FEB352D)
        # The second half of the key enters midway, so that no stream is a shifted copy of another.
        _xorshift32_(x, scratch, 15).bitwise_xor_(high).mul_(_signed32(0x846CA68B))
        return _xorshift32_(x, scratch, 16)

    def uniform(self, n: int, draw: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 [B, n], uniform in (low, high], from 24 random bits each.

        ``low`` never occurs; ``high`` does, since the last of the 2^24 values is rounded to it.
        """
        unit = self.bits(n, draw).bitwise_and_(0xFFFFFF).to(torch.float32)
        scale = (high - low) / (1 << 24)
        return unit.mul_(scale).add_(low + 0.5 * scale)

    def normal(self, n: int, draw: int = 0) -> Tensor:
        """float32 [B, n], standard normal (Box-Muller)."""
        half = (n + 1) // 2
        u = self.uniform(2 * half, draw)
        radius = u[:, :half].log().mul_(-2).sqrt_()
        angle = u[:, half:].mul_(2 * math.pi)
        pair = torch.empty_like(u)
        torch.cos(angle, out=pair[:, :half]).mul_(radius)
        torch.sin(angle, out=pair[:, half:]).mul_(radius)
        return pair[:, :n]

    def integers(self, n: int, high: Tensor | int, draw: int = 0) -> Tensor:
        """int64 [B, n], uniform in 0 .. high-1 (high far below 2^24)."""
        found = (self.uniform(n, draw) * high).to(torch.int64)
        # A uniform number may be exactly 1.
        return torch.minimum(found, torch.as_tensor(high, device=found.device) - 1)
