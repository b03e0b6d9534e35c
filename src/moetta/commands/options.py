"""What several commands share: options, running cells, writing the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moetta.bench import spread
from moetta.bench.cell import Cell, CellOptions, ComputeOptions
from moetta.bench.grid import run_grid
from moetta.bench.progress import Outcome
from moetta.commands.display import Display, make_display
from moetta.methods import list_methods
from moetta.paper.published import METHODS as PAPER_METHODS


@dataclass(frozen=True)
class Running(ComputeOptions):
    """How and where cells are run."""

    out: Path = Path("runs")
    """Folder of the results; finished runs in it are not run again."""
    workers: int = 1
    """How many runs to compute at the same time, each in its own process."""
    checkpoint_seconds: float = 30.0
    """How many seconds of work a killed process may lose."""
    json: bool = False
    """Print JSON, one object per line."""

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Run cells and show their progress; under torchrun, one cell on all ranks."""
        if spread.launched() > 1:
            return self._run_spread(cells)
        with make_display(self.json) as display:
            return run_grid(
                cells,
                self.out,
                workers=self.workers,
                listener=display,
                checkpoint_seconds=self.checkpoint_seconds,
            )

    def _run_spread(self, cells: Sequence[Cell]) -> list[Outcome]:
        cell = spread.check(cells, self.workers)
        ranks = spread.join(cell.device)
        follower = ranks.rank > 0
        with Display() if follower else make_display(self.json) as display:
            outcome = spread.run_spread(cell, self.out, ranks, display, self.checkpoint_seconds)
        if not follower:
            return [outcome] * len(cells)
        if outcome.error is None:
            raise SystemExit(0)  # the first rank shows the results
        raise ValueError(outcome.error)


def cell_fields(options: Running) -> dict[str, Any]:
    """The fields of a cell among a command's options, under the same names."""
    given = {f.name for f in fields(options)}
    names = [f.name for f in fields(CellOptions) if f.name in given]
    return {name: getattr(options, name) for name in names}


def expand_methods(names: Sequence[str]) -> list[str]:
    """Method names, with each group (``all``, ``paper``, or a group of methods) spelt out."""
    known, chosen = list_methods(), list[str]()
    for name in names:
        if name == "all":
            chosen += known
        elif name == "paper":
            chosen += PAPER_METHODS
        else:
            grouped = [m.name for m in known.values() if m.group == name]
            chosen += [name] if name in known else grouped or [name]
    return list(dict.fromkeys(chosen))


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the HTML page of some runs."""
    from moetta.commands.report import make_report  # matplotlib takes a while to load

    return make_report(folders, out, title=title)
