"""What the guard found and did, as plain data."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from moetta.core.step_report import StepReport
from moetta.guard.watch import Look

logger = logging.getLogger("moetta")

REASONS = (
    "concentration",
    "overruling",
    "disagreement",
    "entropy",
    "drift",
    "non-finite",
    "spread",
)
ACTIONS = ("rollback", "reset", "resume", "calm")
MODES = ("adapt", "hold", "source")
EVENTS_KEPT = 100


@dataclass(frozen=True)
class Event:
    """One decision of the guard.

    Attributes:
        step: the call in which it was taken, from 1.
        reason: what led to it: "concentration", "spread", "overruling", "disagreement", "entropy",
            "drift" or "non-finite"; empty for "resume" and "calm", which only need time to pass.
        action: "rollback" (to the last good state, and hold it), "reset" (to the source model, and
            serve that), "resume" (learn again), "calm" (raise the rate again).
        value: what was measured.
        threshold: what it was compared with.
    """

    step: int
    reason: str
    action: str
    value: float
    threshold: float

    def numbers(self) -> list[float]:
        """As numbers only, for a state."""
        reason = float(REASONS.index(self.reason)) if self.reason else -1.0
        return [self.step, reason, float(ACTIONS.index(self.action)), self.value, self.threshold]

    @classmethod
    def of_numbers(cls, numbers: list[float]) -> Event:
        """The inverse of `numbers`."""
        step, reason, action, value, threshold = numbers
        name = REASONS[int(reason)] if reason >= 0 else ""
        return cls(int(step), name, ACTIONS[int(action)], value, threshold)


def log(event: Event, wait: int, rate: float) -> None:
    """Write a decision to the log; trouble as a warning."""
    if event.reason:
        logger.warning(
            "guard: %s at step %d because of %s (%.4g, threshold %.4g); learning stops for %d "
            "images",
            event.action, event.step, event.reason, event.value, event.threshold, wait,
        )  # fmt: skip
    else:
        logger.info("guard: %s at step %d, rate %.4g", event.action, event.step, rate)


@dataclass(frozen=True)
class Findings:
    """How the guard sees the adapter after a call.

    Attributes:
        mode: "adapt" (learning), "hold" (serving a good state, not learning) or "source" (serving
            the source model).
        rate: the share of each learning step that is kept; below 1 after trouble.
        drift: distance of the trained parameters from the source values, relative to their norm;
            as of the last look.
        levels: how far each detector is towards an alarm, which is at 1.
        look: the last look at sampled images, or None before the first.
        event: what was decided in this call, or None.
        weight: the adapted model's share of this answer: 1 if it answered alone, 0 if the source
            model did, between them if the answer is the mean of both, weighted by trust.
    """

    mode: str
    rate: float
    drift: float
    levels: dict[str, float]
    look: Look | None = None
    event: Event | None = None
    weight: float = 1.0

    @property
    def from_source(self) -> bool:
        """Whether this batch was answered by the source model alone."""
        return self.weight == 0


@dataclass(frozen=True)
class GuardReport(StepReport):
    """A `StepReport` with what the guard found.

    Attributes:
        guard: the findings.
    """

    guard: Findings | None = field(default=None)
