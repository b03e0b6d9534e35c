"""What is done about trouble, and when learning resumes."""

from __future__ import annotations

from moetta.guard.config import GuardConfig

# The rate is raised again after this many waits without trouble.
CALM_WAITS = 64


class Recovery:
    """Decides; it knows neither models nor detectors.

    Attributes:
        mode: "adapt", "hold" or "source"; see `Findings`.
        level: troubles that were not yet followed by a long calm. Each makes the next wait
            ``backoff`` times as long and the steps that much shorter.
        wait: images until learning resumes or, while it goes on, until the rate is raised.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        self.mode = "adapt"
        self.level = 0
        self.wait = 0

    @property
    def rate(self) -> float:
        """The share of each learning step that is kept."""
        return float(self._options.backoff**-self.level)

    def trouble(self, has_good_state: bool) -> str:
        """Stop learning; returns "rollback", or "reset" if going back was not or is not enough."""
        reset = self.level > 0 or not has_good_state
        self.mode = "source" if reset else "hold"
        self.wait = int(self._options.cooldown * self._options.backoff**self.level)
        self.level += 1
        return "reset" if reset else "rollback"

    def pass_time(self, images: int) -> str | None:
        """Count images; returns "resume" or "calm" when the wait for it is over."""
        if self.wait == 0:
            return None
        self.wait = max(0, self.wait - images)
        if self.wait:
            return None
        last = self._options.cooldown * self._options.backoff ** (self.level - 1)
        if self.mode == "adapt":
            self.level -= 1
            self.wait = int(CALM_WAITS * last / self._options.backoff) if self.level else 0
            return "calm"
        self.mode = "adapt"
        self.wait = int(CALM_WAITS * last)
        return "resume"
