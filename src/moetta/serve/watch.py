"""What the live page shows: one row per second, and what is true now."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 600
"""Seconds that are remembered."""
MEMORY = 1000
"""Images over which entropy, classes and expert load are averaged."""


Seen = tuple[float | None, float | None]
"""Mean entropy and concentration of a stream's recent images; None before the first one."""


class Recent:
    """Exponentially weighted averages over the last images of one tenant; the engine's.

    Args:
        classes: how many there are.
        experts: how many each routed layer has.
    """

    def __init__(self, classes: int, experts: dict[str, int]) -> None:
        self._images = 0.0
        self._entropy = 0.0
        self._classes = np.zeros(classes)
        self._experts = experts
        self._load = np.zeros((len(experts), max(experts.values(), default=0)))

    def add(self, classes: Tensor, entropy: Tensor, routing: dict[str, Tensor]) -> None:
        """Take one batch: predicted class and entropy [B] of each image, experts by layer."""
        keep = (1 - 1 / MEMORY) ** len(classes)
        self._images = self._images * keep + len(classes)
        self._entropy = self._entropy * keep + float(entropy.sum())
        now = _counts(classes.cpu().numpy(), len(self._classes))
        self._classes = self._classes * keep + now
        chosen = [routing[name].flatten() for name in self._experts if name in routing]
        if len(chosen) == len(self._load) > 0:
            # All layers at once: one by one they take a tenth of a small model's forward pass.
            rows, width = self._load.shape
            layer = np.repeat(np.arange(rows), [len(experts) for experts in chosen])
            places = torch.cat(chosen).cpu().numpy() + width * layer
            self._load = self._load * keep + _counts(places, rows * width).reshape(rows, width)

    @property
    def images(self) -> float:
        """How many images the averages rest on."""
        return self._images

    @property
    def seen(self) -> Seen:
        """Mean entropy and concentration."""
        return self.mean_entropy, self.concentration

    @property
    def mean_entropy(self) -> float | None:
        """Mean entropy in nats; None before the first image."""
        return self._entropy / self._images if self._images else None

    @property
    def concentration(self) -> float | None:
        """Share of the commonest predicted class; None before the first image."""
        return float(self._classes.max() / self._classes.sum()) if self._images else None

    def load(self) -> dict[str, list[float]]:
        """Share of each expert, by layer; empty before the first routed image."""
        shares = self._load / np.maximum(self._load.sum(1, keepdims=True), 1e-12)
        return {
            name: shares[row, :count].round(4).tolist()
            for row, (name, count) in enumerate(self._experts.items())
            if shares[row].any()
        }


def together(several: Sequence[Recent]) -> Seen:
    """Mean entropy and concentration of several streams, each weighted by its recent images."""
    seen = [(one.images, *one.seen) for one in several]
    images = sum(n for n, _, _ in seen)
    if not images:
        return None, None
    return (
        sum(n * (entropy or 0.0) for n, entropy, _ in seen) / images,
        sum(n * (concentration or 0.0) for n, _, concentration in seen) / images,
    )


def _counts(values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.bincount(values, minlength=size)[:size]


class Watch:
    """The last minutes, second by second. Any thread may add; the event loop closes the rows."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._rows: deque[tuple[dict[str, Any], dict[str, Seen]]] = deque(maxlen=ROWS)
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

    def tick(self, queue: int, seen: dict[str, Seen]) -> None:
        """Close the row of the last second, in which the streams in memory looked like this."""
        latencies, self._latencies = sorted(self._latencies), []
        refused, self._refused = self._refused, 0
        with self._lock:
            images, batches, learnt = self._images, self._batches, self._learnt
            self._images = self._batches = self._learnt = 0
        row = {
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
        }
        self._rows.append((row, seen))

    def since(self, t: float, stream: str) -> list[dict[str, Any]]:
        """The rows after that time, with that stream's entropy and concentration."""
        found = []
        for row, seen in list(self._rows):
            if row["t"] > t:
                entropy, concentration = map(_rounded, seen.get(stream, (None, None)))
                found.append({**row, "entropy": entropy, "concentration": concentration})
        return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _quantile(ordered: list[float], share: float) -> float | None:
    """In milliseconds."""
    if not ordered:
        return None
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
