"""Change detectors with a stated interval between false alarms, and what they watch.

A *look* is a group of sampled images that both the source model and the adapted model have
classified. Every look gives each detector one value; detectors do not know about models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A shift of a quarter of a standard deviation per look is the slow decline; one of a whole standard
# deviation is a collapse. A CUSUM is fastest for a shift of twice its reference value.
REFERENCES = (0.125, 0.5)
# One look may count as this many standard deviations at most, so that none can decide alone.
LARGEST = 4.0
# Looks that the moving averages remember.
MEMORY = 50


def cusum_threshold(reference: float, interval: float) -> float:
    """The threshold at which a CUSUM of standard normal values gives one false alarm per interval.

    Siegmund's formula, solved for h: with b = h + 1.166 and reference k, the mean number of values
    before a false alarm is (exp(2kb) - 2kb - 1) / 2k².

    >>> round(cusum_threshold(0.5, 930), 1)  # as in published tables
    5.0
    """
    low, high = 0.0, 1e4
    while high - low > 1e-9:
        middle = (low + high) / 2
        exponent = 2 * reference * (middle + 1.166)
        early = exponent < 500 and math.expm1(exponent) - exponent < interval * 2 * reference**2
        low, high = (middle, high) if early else (low, middle)
    return high


@dataclass
class MeanDetector:
    """Raises an alarm when the mean of a value rises above zero, however slowly.

    Two CUSUMs of the standardised value, one for a slow and one for a fast rise. The standard
    deviation is a moving estimate.

    Attributes:
        interval: looks between false alarms while the mean is at most zero.
    """

    interval: float
    sums: list[float] = field(default_factory=lambda: [0.0] * len(REFERENCES))
    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        # Two tests share the false alarms.
        share = len(REFERENCES) * self.interval
        self.thresholds = [cusum_threshold(k, share) for k in REFERENCES]

    def update(self, value: float, floor: float) -> None:
        """Take the value of one look; its standard deviation is at least ``floor``."""
        deviation = math.sqrt(self.square / self.weight) if self.weight else 0.0
        deviation = max(deviation, floor)
        z = min(max(value / deviation, -LARGEST), LARGEST)
        self.sums = [max(0.0, s + z - k) for s, k in zip(self.sums, REFERENCES, strict=True)]
        keep = 1 - 1 / MEMORY
        centre = self.mean / self.weight if self.weight else 0.0
        # Beyond three deviations it is the change itself, not the value's usual variation.
        residual = min(abs(value - centre), 3 * deviation)
        self.square = keep * self.square + residual**2
        self.mean = keep * self.mean + value
        self.weight = keep * self.weight + 1

    def pass_by(self) -> None:
        """Let a look pass that says nothing about the value; evidence ages."""
        self.sums = [max(0.0, s - k) for s, k in zip(self.sums, REFERENCES, strict=True)]

    @property
    def level(self) -> float:
        """How far it is towards an alarm, which is at 1."""
        return max(s / h for s, h in zip(self.sums, self.thresholds, strict=True))

    def state(self) -> list[float]:
        """All that it remembers."""
        return [*self.sums, self.mean, self.square, self.weight]

    def restore(self, state: list[float]) -> None:
        """Take back a `state`."""
        *self.sums, self.mean, self.square, self.weight = state

    def clear(self) -> None:
        """Forget everything."""
        self.restore([0.0] * (len(REFERENCES) + 3))


@dataclass
class RateDetector:
    """Raises an alarm when events become more frequent than a given rate.

    A CUSUM of the log-likelihood ratio between the highest rate that is in order, p, and the rate
    half-way from p to 1. For any such CUSUM the mean number of events before a false alarm is at
    least exp(threshold) (Lorden, 1971); no approximation is involved.

    Attributes:
        interval: looks between false alarms while the rate is at most p.
    """

    interval: float
    sum: float = 0.0

    def update(self, events: float, trials: float, rate: float) -> None:
        """Take one look: ``events`` in ``trials``, where at most ``rate`` is in order."""
        rate = min(max(rate, 1 / (2 * trials)), 1 - 1 / (2 * trials))
        worse = (1 + rate) / 2
        gain = events * math.log(worse / rate)
        gain += (trials - events) * math.log((1 - worse) / (1 - rate))
        self.sum = max(0.0, self.sum + gain)

    @property
    def level(self) -> float:
        """How far it is towards an alarm, which is at 1."""
        return self.sum / math.log(self.interval)

    def state(self) -> list[float]:
        """All that it remembers."""
        return [self.sum]

    def restore(self, state: list[float]) -> None:
        """Take back a `state`."""
        (self.sum,) = state

    def clear(self) -> None:
        """Forget everything."""
        self.sum = 0.0


class Frequencies:
    """How often each class was predicted lately.

    Attributes:
        counts: decaying counts [2, C]: by the source model and by the adapted model.
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(2, classes, dtype=torch.float64)

    def concentration(self, source: Tensor, adapted: Tensor) -> float:
        """How much less diverse the adapted predictions are than the source model's, in nats.

        Its mean is H(source) - H(adapted), the entropies of the two class frequencies. Both are
        measured on the same images, so a burst of classes or a new domain cancels.
        """
        counts = self.counts + 0.5  # Krichevsky and Trofimov's estimate; all logarithms are finite
        shares = (counts / counts.sum(1, keepdim=True)).log()
        return float(shares[1, adapted].mean() - shares[0, source].mean())

    @property
    def gained(self) -> float:
        """How much more diverse the adapted predictions are by now, in nats."""
        counts = self.counts + 0.5
        shares = counts / counts.sum(1, keepdim=True)
        source, adapted = -(shares * shares.log()).sum(1)
        return float(adapted - source)

    def add(self, source: Tensor, adapted: Tensor) -> None:
        """Count the predictions of one look."""
        self.counts *= 1 - 1 / MEMORY
        for row, predictions in zip(self.counts, (source, adapted), strict=True):
            row += torch.bincount(predictions, minlength=len(row))
