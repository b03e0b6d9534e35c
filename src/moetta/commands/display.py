"""Showing a grid's progress: live in a terminal, as plain lines elsewhere, as JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from moetta.results.runs import Run, load_run, number

if TYPE_CHECKING:  # `moetta results` prints with this module and must not load torch
    from moetta.bench.cell import Cell
    from moetta.bench.progress import Outcome, Progress


class Display:
    """A listener for `run_grid` that shows nothing; to be used as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def begin(self, cells: Sequence[Cell]) -> None:
        """The grid is about to run."""

    def update(self, cell: Cell, progress: Progress) -> None:
        """A cell has moved on."""

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """A cell has ended."""

    def stop(self, done: int, total: int) -> None:
        """The grid was interrupted; everything is saved."""


STOPPED = "stopped after {done} of {total} runs; the same command resumes where it stopped"


class Lines(Display):
    """A line per cell now and then, and one when it ends."""

    def __init__(self, every: float = 30.0) -> None:
        self.every = every
        self.told: dict[Cell, float] = {}
        self.done = self.total = 0

    def begin(self, cells: Sequence[Cell]) -> None:
        """Say how many runs there are."""
        self.total = len(cells)
        print(f"{self.total} run{'s' if self.total > 1 else ''}", flush=True)

    def update(self, cell: Cell, progress: Progress) -> None:
        """Show a cell's progress, unless that was shown a moment ago."""
        now = time.monotonic()
        if now - self.told.setdefault(cell, now) >= self.every:
            self.told[cell] = now
            print(f"  {cell.label}: {_words(progress)}", flush=True)

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Say how a cell ended."""
        self.done += 1
        print(f"[{self.done}/{self.total}] {cell.label}: {_ending(outcome)}", flush=True)

    def stop(self, done: int, total: int) -> None:
        """Say how to resume."""
        print(STOPPED.format(done=done, total=total), flush=True)


class JSONLines(Display):
    """One JSON object per line: begin, progress (each cell once a second), end, stopped."""

    def __init__(self) -> None:
        self.told: dict[Cell, float] = {}

    def begin(self, cells: Sequence[Cell]) -> None:
        """List all cells."""
        self._say("begin", cells=[_identity(cell) for cell in cells])

    def update(self, cell: Cell, progress: Progress) -> None:
        """Write a cell's progress."""
        now = time.monotonic()
        if now - self.told.get(cell, -1e9) >= 1.0:
            self.told[cell] = now
            self._say("progress", **_identity(cell), **asdict(progress))

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Say how a cell ended, with its summary."""
        folder = outcome.folder
        summary = load_run(folder).summary if folder else None
        self._say(
            "end",
            **_identity(cell),
            folder=None if folder is None else str(folder),
            error=outcome.error,
            stopped_early=outcome.stopped,
            summary=summary,
        )

    def stop(self, done: int, total: int) -> None:
        """Say how to resume."""
        self._say("stopped", done=done, total=total, resume="run the same command again")

    def _say(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), flush=True)


class LiveTable(Display):
    """A table in the terminal, one line per cell; if space is short, the cells that matter most."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.live = Live(self, console=self.console, refresh_per_second=4)
        self.cells: list[Cell] = []
        self.latest: dict[Cell, Progress] = {}
        self.endings: dict[Cell, Outcome] = {}
        self.runs: dict[Cell, Run] = {}

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def begin(self, cells: Sequence[Cell]) -> None:
        """Draw the table."""
        self.cells = list(cells)

    def update(self, cell: Cell, progress: Progress) -> None:
        """Fill in a line."""
        self.latest[cell] = progress

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Complete a line."""
        self.endings[cell] = outcome
        if outcome.folder is not None:
            self.runs[cell] = load_run(outcome.folder)

    def stop(self, done: int, total: int) -> None:
        """Say how to resume."""
        self.console.print(STOPPED.format(done=done, total=total), highlight=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"{len(self.endings)} of {len(self.cells)} runs done", expand=False)
        table.add_column("run", overflow="fold")
        for name in ("progress", "accuracy %", "vs noadapt", "images/s", "left"):
            table.add_column(name, justify="right")
        for cell in self._visible(max(4, console.size.height - 6)):
            table.add_row(escape(cell.label), *self._line(cell))
        yield table

    def _visible(self, room: int) -> list[Cell]:
        if len(self.cells) <= room:
            return self.cells
        running = [c for c in self.cells if c in self.latest and c not in self.endings]
        done = [c for c in self.cells if c in self.endings]
        waiting = [c for c in self.cells if c not in self.endings and c not in self.latest]
        recent = done[-max(1, room - len(running) - 2) :]
        return [*recent, *running, *waiting[:2]][:room]

    def _line(self, cell: Cell) -> tuple[str, ...]:
        if cell in self.endings:
            run = self.runs.get(cell)
            if self.endings[cell].stopped is not None:
                return ("[yellow]stopped early[/yellow]", "", "", "", "")
            if run is None:
                refused = self.endings[cell].refused
                said = "[yellow]refused[/yellow]" if refused else "[red]failed[/red]"
                return (said, "", "", "", "")
            seconds = number(run, "cost", "seconds")
            rate = f"{run.summary['samples'] / seconds:.0f}" if seconds else ""
            gain = points(number(run, "gain"))
            return ("[green]done[/green]", f"{run.accuracy:.2f}", gain, rate, "")
        if cell not in self.latest:
            return ("waiting", "", "", "", "")
        now = self.latest[cell]
        share = f"{100 * now.samples / now.samples_total:.0f} %"
        accuracy = f"{100 * now.accuracy:.2f}"
        return (share, accuracy, points(now.gain), f"{now.rate:.0f}", clock(now.eta))


def make_display(as_json: bool = False) -> Display:
    """The display that suits where the output goes."""
    if as_json:
        return JSONLines()
    return LiveTable() if sys.stdout.isatty() else Lines()


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss.

    >>> clock(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def points(gain: float | None) -> str:
    """A difference of shares in percentage points.

    >>> points(0.0123)
    '+1.23'
    """
    return "" if gain is None else f"{100 * gain:+.2f}"


def _words(progress: Progress) -> str:
    gain = "" if progress.gain is None else f" ({points(progress.gain)} vs noadapt)"
    resumed = f", resumed at batch {progress.resumed}" if progress.resumed else ""
    return (
        f"batch {progress.step}/{progress.steps}, accuracy {100 * progress.accuracy:.2f} %{gain}, "
        f"{progress.rate:.0f} images/s, {clock(progress.eta)} left{resumed}"
    )


def _ending(outcome: Outcome) -> str:
    if outcome.stopped is not None:
        return outcome.stopped
    if outcome.folder is None:
        return f"{'refused' if outcome.refused else 'failed'}: {outcome.error}"
    run = load_run(outcome.folder)
    gain, ratio = number(run, "gain"), number(run, "cost", "time_ratio")
    lead = "" if gain is None else f" ({points(gain)} vs noadapt)"
    cost = "" if ratio is None else f", {ratio:.2f} x noadapt's time"
    return f"accuracy {run.accuracy:.2f} %{lead}{cost}"


def _identity(cell: Cell) -> dict[str, Any]:
    return {
        "method": cell.method,
        "variant": cell.variant,
        "stream": cell.stream_name,
        "model": cell.model_name,
        "seed": cell.seed,
    }
