"""What the live page shows: one row per second, and what is true now."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

ROWS = 600
"""Seconds that are remembered."""
MEMORY = 1000
"""Images over which entropy, classes and expert load are averaged."""


class Recent:
    """Exponentially weighted averages over the last images of one tenant; the engine's."""

    def __init__(self) -> None:
        self.images = 0.0
        self.entropy = 0.0
        self._classes: Tensor | None = None
        self._load: dict[str, Tensor] = {}

    def add(self, classes: Tensor, entropy: Tensor, routing: dict[str, Tensor], total: int) -> None:
        """Take one batch: predicted class and entropy [B] of each image, experts by layer."""
        count = len(classes)
        keep = (1 - 1 / MEMORY) ** count
        self.images = self.images * keep + count
        self.entropy = self.entropy * keep + float(entropy.sum())
        self._classes = _fade(self._classes, classes, total, keep)
        for name, experts in routing.items():
            self._load[name] = _fade(
                self._load.get(name), experts.flatten(), int(experts.max()) + 1, keep
            )

    @property
    def mean_entropy(self) -> float | None:
        """Mean entropy in nats; None before the first image."""
        return self.entropy / self.images if self.images else None

    @property
    def concentration(self) -> float | None:
        """Share of the commonest predicted class."""
        return None if self._classes is None else float(self._classes.max() / self._classes.sum())

    def load(self) -> dict[str, list[float]]:
        """Share of each expert, by layer."""
        most = max((len(counts) for counts in self._load.values()), default=0)
        return {
            name: [round(v, 4) for v in (counts / counts.sum()).tolist()]
            + [0.0] * (most - len(counts))
            for name, counts in list(self._load.items())
        }


def _fade(held: Tensor | None, values: Tensor, size: int, keep: float) -> Tensor:
    now = torch.bincount(values.detach().cpu(), minlength=size).double()
    if held is None:
        return now
    if len(held) < len(now):
        held = torch.cat((held, held.new_zeros(len(now) - len(held))))
    elif len(now) < len(held):
        now = torch.cat((now, now.new_zeros(len(held) - len(now))))
    return held * keep + now


class Watch:
    """The last minutes, second by second. Any thread may add; the event loop closes the rows."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self._lock = threading.Lock()
        self._latencies: list[float] = []
        self._refused = 0
        self._batches = 0
        self._learnt = 0
        self._images = 0

    def answered(self, seconds: float) -> None:
        """A request was answered."""
        self._latencies.append(seconds)

    def refused(self) -> None:
        """A request was refused."""
        self._refused += 1

    def batch(self, images: int, learnt: bool) -> None:
        """A batch was answered."""
        with self._lock:
            self._images += images
            self._batches += 1
            self._learnt += learnt

    def tick(self, queue: int, entropy: float | None, concentration: float | None) -> None:
        """Close the row of the last second."""
        latencies, self._latencies = sorted(self._latencies), []
        refused, self._refused = self._refused, 0
        with self._lock:
            images, batches, learnt = self._images, self._batches, self._learnt
            self._images = self._batches = self._learnt = 0
        self.rows.append(
            {
                "t": round(time.monotonic() - self.started, 1),
                "requests": len(latencies),
                "refused": refused,
                "images": images,
                "batches": batches,
                "learnt": learnt,
                "queue": queue,
                "p50": _quantile(latencies, 0.5),
                "p95": _quantile(latencies, 0.95),
                "p99": _quantile(latencies, 0.99),
                "entropy": None if entropy is None else round(entropy, 4),
                "concentration": None if concentration is None else round(concentration, 4),
            }
        )

    def since(self, t: float) -> list[dict[str, Any]]:
        """The rows after that time."""
        return [row for row in list(self.rows) if row["t"] > t]


def _quantile(ordered: list[float], share: float) -> float | None:
    """In milliseconds."""
    if not ordered:
        return None
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
