"""The guard's options."""

from __future__ import annotations

from dataclasses import dataclass

from moetta.core.config import Config, positive, require, share


@dataclass(frozen=True)
class GuardConfig(Config):
    """The guard's options.

    Attributes:
        seed: seed of the choice of sampled images.
        sample: images in one look, and the most that are sampled from one batch in good times.
        share: the largest share of the traffic that the source model classifies too, in good times.
            It is what the guard costs, in forward passes per image.
        probation: the source model classifies this many images after a start or a resumption, and
            all while a detector is at least half-way to an alarm.
        tolerance: the share of the predictions that adaptation may spoil before this counts as
            trouble. 0.005 is half a point of accuracy.
        interval: looks between false alarms, on average.
        drift_limit: the largest relative distance of the trained parameters from their source
            values. At 1 they have moved by their own norm.
        cooldown: images to wait after trouble before learning again.
        reweigh: in traffic of few classes, learn nothing, and weigh every class by how frequent it
            is instead.
        backoff: factor by which trouble that is blamed on the rate shortens the steps, and
            lengthens the wait if it comes again.
    """

    sample: int = 16
    share: float = 0.25
    probation: int = 1024
    tolerance: float = 0.005
    interval: float = 10_000.0
    drift_limit: float = 1.0
    cooldown: int = 1024
    backoff: float = 4.0
    reweigh: bool = True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "sample", "share", "drift_limit", "cooldown")
        require(self.probation >= 0, f"probation must be at least 0, got {self.probation}")
        share(self, "tolerance")
        require(self.share <= 1, f"share must be at most 1, got {self.share}")
        require(self.interval > 1, f"interval must be above 1, got {self.interval}")
        require(self.backoff >= 1, f"backoff must be at least 1, got {self.backoff}")
