"""What a grid reports while it runs, and the interface of listeners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moetta.bench.cell import Cell


@dataclass(frozen=True)
class Progress:
    """How far a cell has come.

    Attributes:
        step: batches done.
        steps: batches in the stream.
        samples: images seen.
        samples_total: images in the stream.
        accuracy: share of correct predictions so far.
        gain: accuracy minus the source model's, over the batches that both saw; None before any.
        rate: images per second, in this session.
        eta: seconds left.
        resumed: the batch at which this session resumed an earlier one.
    """

    step: int
    steps: int
    samples: int
    samples_total: int
    accuracy: float
    gain: float | None
    rate: float
    eta: float
    resumed: int = 0


class Refused(ValueError):
    """A method does not serve this model; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Attributes:
        folder: its results, if it finished.
        error: why it did not.
        details: the traceback, if the error is not the user's.
        refused: whether it did not start because the method does not serve the model.
        stopped: how far it came, if it was stopped early; it has no result then.
    """

    folder: Path | None = None
    error: str | None = None
    details: str | None = None
    refused: bool = False
    stopped: str | None = None


class Listener(Protocol):
    """Is told how a grid is doing; see `moetta.commands.display` for listeners that show it."""

    def begin(self, cells: Sequence[Cell]) -> None:
        """The grid is about to run."""

    def update(self, cell: Cell, progress: Progress) -> None:
        """A cell has moved on."""

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """A cell has ended."""

    def stop(self, done: int, total: int) -> None:
        """The grid was interrupted; everything is saved."""


class Silent:
    """A listener that does nothing."""

    def begin(self, cells: Sequence[Cell]) -> None:
        """Ignore it."""

    def update(self, cell: Cell, progress: Progress) -> None:
        """Ignore it."""

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Ignore it."""

    def stop(self, done: int, total: int) -> None:
        """Ignore it."""
