"""What is done about trouble, and when learning resumes."""

from __future__ import annotations

from moetta.guard.config import GuardConfig

# The rate is raised again after this many waits without trouble.
CALM_WAITS = 64
# The first trouble is too soon within this many waits of learning, and each further one within
# twice as many as the one before: however long the stream, those that are not are few.
SOON_WAITS = 2


class Recovery:
    """Decides; it knows neither models nor detectors.

    Attributes:
        mode: "adapt", "hold" or "source"; see `Findings`.
        level: troubles that were blamed on the rate and not yet followed by a long calm. Each makes
            the next wait ``backoff`` times as long and the steps that much shorter.
        wait: images until learning resumes or, while it goes on, until the rate is raised.
        learnt: images since learning began or resumed.
        from_source: whether it began or resumed with the source model.
        troubles: troubles while learning, since the last long calm.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        self.mode = "adapt"
        self.level = 0
        self.wait = 0
        self.learnt = 0
        self.from_source = True
        self.troubles = 0

    @property
    def rate(self) -> float:
        """The share of each learning step that is kept."""
        return float(self._options.backoff**-self.level)

    @property
    def _usual_wait(self) -> float:
        return float(self._options.cooldown * self._options.backoff ** max(self.level - 1, 0))

    def trouble(self, has_good_state: bool) -> str:
        """Stop learning; returns "rollback", or "reset" if going back was not or is not enough.

        What is blamed: the good state, if it is in trouble while nothing is learnt, or soon after;
        the rate, if learning from the source model leads to trouble soon; else the traffic.
        """
        soon = self.learnt < SOON_WAITS * 2**self.troubles * self._options.cooldown
        holding = self.mode == "hold"
        self.troubles += not holding
        if soon and self.from_source and not holding:
            self.level += 1
        reset = holding or not has_good_state or self.level > 1 or (soon and not self.from_source)
        if not holding:  # or the wait goes on
            self.wait = int(self._usual_wait)
        self.mode, self.from_source = ("source", True) if reset else ("hold", False)
        return "reset" if reset else "rollback"

    def pass_time(self, images: int) -> str | None:
        """Count images; returns "resume" or "calm" when the wait for it is over."""
        if self.mode == "adapt":
            self.learnt += images
            if self.learnt >= CALM_WAITS * self._options.cooldown:
                self.troubles = 0
        if self.wait == 0:
            return None
        self.wait = max(0, self.wait - images)
        if self.wait:
            return None
        if self.mode == "adapt":
            self.level -= 1
            self.wait = int(CALM_WAITS * self._usual_wait) if self.level else 0
            return "calm"
        self.mode = "adapt"
        self.learnt = 0
        self.wait = int(CALM_WAITS * self._usual_wait) if self.level else 0
        return "resume"
