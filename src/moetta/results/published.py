"""Published results, as plain data to compare ours with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Printed:
    """A published number, with its standard deviation if there is one."""

    mean: float
    sd: float | None = None


@dataclass(frozen=True)
class Published:
    """What a publication reports for one model on one stream, or for their counterparts.

    Attributes:
        accuracy: Accuracy in %, by method and variant.
        costs: By method: "time", "forward" and "backward" in %, "activated" in thousands.
        caveat: How the publication's model and data differ from ours.
        cost_note: Where the costs were measured.
        order: Its methods in its order; rows of tables follow it.
        proposed: The method it proposes.
    """

    accuracy: Mapping[tuple[str, str | None], Printed] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    caveat: str | None = None
    cost_note: str | None = None
    order: tuple[str, ...] = ()
    proposed: str | None = None
