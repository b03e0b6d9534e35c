"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetta.bench.backends import Outcome
from moetta.bench.cell import Cell
from moetta.bench.grid import run_grid
from moetta.commands.display import make_display


@dataclass(frozen=True)
class Running:
    """How and where cells are run."""

    out: Path = Path("runs")
    """Folder of the results; what is finished there is not run again."""
    workers: int = 1
    """Runs at the same time, each in a process of its own."""
    threads: int | None = None
    """CPU threads of a run; by default all, shared among the workers."""
    loaders: int = 0
    """Processes that read images ahead, for each run; 0 reads in the run's own."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, mps."""
    checkpoint_seconds: float = 30.0
    """How much work a killed process may lose."""
    json: bool = False
    """Print JSON, one object a line, for machines."""

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Run cells and show how they fare."""
        return run_grid(
            cells,
            self.out,
            workers=self.workers,
            display=make_display(self.json),
            checkpoint_seconds=self.checkpoint_seconds,
        )


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path | None:
    """The HTML page of some runs; None, with the reason on stderr, where it cannot be made."""
    try:
        from moetta.commands.report import make_report
    except ImportError as error:
        print(f"no report page: {error} (pip install 'moetta[bench]')", file=sys.stderr)
        return None
    return make_report(folders, out, title=title)
