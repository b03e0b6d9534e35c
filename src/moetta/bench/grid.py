"""A grid: making its cells, running those that are not finished, stopping cleanly."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from moetta.bench import interrupts
from moetta.bench.backends import Backend, make_backend
from moetta.bench.cell import BASELINE, Cell
from moetta.bench.finished import find_finished
from moetta.bench.progress import Listener, Outcome, Silent
from moetta.suggest import nearest

log = logging.getLogger("moetta")


def make_grid(**axes: Any) -> list[Cell]:
    """All combinations of the given fields of `Cell`; those given as a list are varied, in order.

    >>> cells = make_grid(method=["tent", "sar"], stream="classical", model="digits-vit")
    >>> [cell.label for cell in cells]
    ['tent classical digits-vit s42', 'sar classical digits-vit s42']
    """
    names = {f.name for f in fields(Cell)}
    for name in axes:
        if name not in names:
            raise ValueError(f"a cell has no field {name!r}; {nearest(name, names)}")
    choices = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [Cell(**dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*choices)]


def run_grid(
    cells: Sequence[Cell],
    root: Path,
    *,
    workers: int = 1,
    listener: Listener | None = None,
    backend: Backend | None = None,
    checkpoint_seconds: float = 30.0,
) -> list[Outcome]:
    """Run all cells that are not finished yet; returns how each ended, in the order given.

    A finished cell needs neither its data nor its weights. Cells of noadapt run first, because the
    others compare themselves with them.

    Args:
        cells: the grid.
        root: folder of the results.
        workers: how many processes; 1 runs the cells in this process.
        listener: is told about progress.
        backend: another way to run cells.
        checkpoint_seconds: how many seconds of work a killed process may lose.

    Raises:
        ValueError: a cell names something that does not exist. Nothing has been run then.
        KeyboardInterrupt: Ctrl-C or SIGTERM; finished work is kept, and the same call resumes.
    """
    if not cells:
        raise ValueError("there is nothing to run: the grid is empty")
    unique = list(dict.fromkeys(cells))
    outcomes: dict[Cell, Outcome] = {}
    new, unsure = list[Cell](), list[Cell]()
    for cell in unique:
        found = find_finished(cell, root)
        if found is not None and found.certain:
            outcomes[cell] = Outcome(found.folder)
        else:
            (new if found is None else unsure).append(cell)
    listener = listener or Silent()
    backend = backend or make_backend(root, workers, checkpoint_seconds)
    if new or unsure:
        backend.prepare(new, unsure)
    root.mkdir(parents=True, exist_ok=True)
    listener.begin(unique)
    for cell, outcome in outcomes.items():
        listener.finish(cell, outcome)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.deferred())
        stack.callback(backend.cancel)
        for first in (True, False):
            phase = [c for c in unique if c not in outcomes and (c.method == BASELINE) == first]
            pending = {backend.submit(cell): cell for cell in phase}
            while pending:
                for ticket, progress in backend.progress():
                    if ticket in pending:
                        listener.update(pending[ticket], progress)
                for ticket in list(pending):
                    if (ended := backend.result(ticket)) is not None:
                        cell = pending.pop(ticket)
                        outcomes[cell] = ended
                        listener.finish(cell, ended)
                if interrupts.requested():
                    backend.cancel()
                    listener.stop(len(outcomes), len(unique))
                    raise KeyboardInterrupt
    return [outcomes[cell] for cell in cells]


def finished_folders(outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders of the cells that finished."""
    return [o.folder for o in outcomes if o.folder is not None]


def require_all(
    cells: Sequence[Cell], outcomes: Sequence[Outcome], optional: Collection[str] = ()
) -> None:
    """Raise if a cell failed; to be called once everything that finished is shown and written.

    Args:
        cells: what was wanted.
        outcomes: how each ended.
        optional: methods that nobody named one by one; a model that one of them does not serve is
            told of, and is no failure unless nothing else could be run.

    Raises:
        ValueError: some cells failed; says how many, which and why.
    """
    reasons: dict[str, list[str]] = {}
    for cell, outcome in zip(cells, outcomes, strict=True):
        if outcome.error is not None:
            reasons.setdefault(outcome.error, []).append(cell.label)
    left_out = {
        outcome.error: None
        for cell, outcome in zip(cells, outcomes, strict=True)
        if outcome.refused and cell.method in optional and outcome.error is not None
    }
    if finished_folders(outcomes):
        for reason in left_out:
            log.warning("left out: %s: %s", _shortened(reasons.pop(reason)), reason)
    if not reasons:
        return
    for details in dict.fromkeys(o.details for o in outcomes if o.details):
        log.error(details)
    lines = [f"{_shortened(labels)}: {reason}" for reason, labels in reasons.items()]
    failed = sum(map(len, reasons.values()))
    raise ValueError("\n".join([f"{failed} of {len(outcomes)} runs failed", *lines]))


def _shortened(labels: Sequence[str], most: int = 3) -> str:
    more = len(labels) - most
    return ", ".join(labels[:most]) + (f" and {more} more" if more > 0 else "")
