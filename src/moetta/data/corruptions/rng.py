"""Random numbers that belong to a sample, not to a batch.

A counter-based generator: the n-th number of draw d of sample i is a hash of (seed, i, name, d, n).
Nothing is carried from one call to the next, so batch composition, order, worker count and device
cannot matter. Everything is 32-bit integer arithmetic on whole tensors, the same on every device.
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
    """Finaliser of splitmix64 on uint64, which wraps around."""
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
    """One random stream for each sample of a batch; `draw` numbers a stream's independent uses."""

    keys: np.ndarray  # uint64 [B]
    device: torch.device

    @classmethod
    def of(cls, seed: int, index: Tensor, name: str, device: torch.device) -> "Streams":
        """Streams of the samples `index` (int64 [B]) for the corruption `name`."""
        base = np.full(len(index), (_word(name) + seed * 0x9E3779B97F4A7C15) & _MASK64, np.uint64)
        return cls(_mix64(_mix64(base) + index.cpu().numpy().view(np.uint64)), device)

    def __len__(self) -> int:
        return len(self.keys)

    def narrow(self, start: int, stop: int) -> "Streams":
        """The streams of samples start .. stop-1."""
        return Streams(self.keys[start:stop], self.device)

    def bits(self, n: int, draw: int = 0) -> Tensor:
        """int32 [B, n]: 32 random bits each."""
        key = _mix64(self.keys + np.uint64((draw + 1) * 0xD1342543DE82EF95 & _MASK64))
        halves = torch.from_numpy(key.astype("<u8").view("<i4").reshape(-1, 2)).to(self.device)
        low, high = halves[:, :1], halves[:, 1:]
        x = _counters(n, self.device) + low
        scratch = torch.empty_like(x)
        _xorshift32_(x, scratch, 16).mul_(0x7FEB352D)
        # The key's second half enters midway: no stream is a shifted copy of another.
        _xorshift32_(x, scratch, 15).bitwise_xor_(high).mul_(_signed32(0x846CA68B))
        return _xorshift32_(x, scratch, 16)

    def uniform(self, n: int, draw: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 [B, n], uniform in (low, high]: 24 random bits each, never ``low`` itself.

        Rounded to float32 the last of the 2^24 values is ``high``.
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
        # A uniform number may be 1 itself.
        return torch.minimum(found, torch.as_tensor(high, device=found.device) - 1)
