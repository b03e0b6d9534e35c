"""Runs a grid: checks it, hands its cells to a backend, shows how they fare, stops cleanly."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from moetta.bench.backends import Backend, Outcome, make_backend
from moetta.bench.cell import Cell

if TYPE_CHECKING:
    from moetta.commands.display import Display


def run_grid(
    cells: Sequence[Cell],
    root: Path,
    *,
    workers: int = 1,
    display: Display | None = None,
    backend: Backend | None = None,
    checkpoint_seconds: float = 30.0,
) -> list[Outcome]:
    """Run all cells that are not finished yet; returns how each ended, in the order given.

    Cells of noadapt run first: the others compare themselves with them where they can.

    Args:
        cells: the grid.
        root: folder of the results.
        workers: processes; 1 runs the cells in this one.
        display: where progress is shown; the terminal by default.
        backend: another way to run cells.
        checkpoint_seconds: how much work a killed process may lose.

    Raises:
        ValueError: a cell names something that does not exist. Nothing has been run then.
        KeyboardInterrupt: Ctrl-C; what was done is kept, and the same call resumes it.
    """
    if not cells:
        raise ValueError("there is nothing to run: the grid is empty")
    unique = list(dict.fromkeys(cells))
    for cell in unique:
        cell.check()
    from moetta.commands.display import make_display

    root.mkdir(parents=True, exist_ok=True)
    backend = backend or make_backend(root, workers, checkpoint_seconds)
    outcomes: dict[Cell, Outcome] = {}
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(display or make_display())
        interrupted = stack.enter_context(_interruptible())
        stack.callback(backend.cancel)
        shown.begin(unique)
        for first in (True, False):
            phase = [cell for cell in unique if (cell.method == "noadapt") == first]
            pending = {backend.submit(cell): cell for cell in phase}
            while pending:
                for ticket, news in backend.progress():
                    if ticket in pending:
                        shown.update(pending[ticket], news)
                for ticket in list(pending):
                    if (outcome := backend.result(ticket)) is not None:
                        cell = pending.pop(ticket)
                        outcomes[cell] = outcome
                        shown.finish(cell, outcome)
                if interrupted.is_set():
                    backend.cancel()
                    shown.stop(len(outcomes), len(unique))
                    raise KeyboardInterrupt
    return [outcomes[cell] for cell in cells]


def finished(outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders of the cells that finished."""
    return [o.folder for o in outcomes if o.folder is not None]


def require_all(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> None:
    """To be called last, when all that finished is told and written.

    Raises:
        ValueError: some cell failed; says how many, which and why.
    """
    reasons: dict[str, list[str]] = {}
    for cell, outcome in zip(cells, outcomes, strict=True):
        if outcome.error is not None:
            reasons.setdefault(outcome.error, []).append(cell.label)
    if not reasons:
        return
    for details in dict.fromkeys(o.details for o in outcomes if o.details):
        print(details, file=sys.stderr)
    lines = [f"{_few(labels)}: {reason}" for reason, labels in reasons.items()]
    failed = sum(map(len, reasons.values()))
    raise ValueError("\n".join([f"{failed} of {len(outcomes)} runs failed", *lines]))


def _few(labels: Sequence[str], most: int = 3) -> str:
    more = len(labels) - most
    return ", ".join(labels[:most]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Within the block Ctrl-C sets an event, so that a batch is never left half done.

    A second Ctrl-C stops at once; the last checkpoint stands.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may handle signals
        return

    def handle(_: int, __: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
