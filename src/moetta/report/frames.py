"""The tables of runs, read when a figure needs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moetta.results import Problem, Run
from moetta.results.runs import brief

if TYPE_CHECKING:
    import polars as pl


@dataclass
class Frames:
    """Reads tables of runs and lists those that cannot be used."""

    problems: list[Problem] = field(default_factory=list)

    def read(self, run: Run, name: str) -> pl.DataFrame | None:
        """A table of a run; None if it cannot be used, and then the problem is noted."""
        try:
            return run.frame(name)
        except (ValueError, OSError) as error:
            path = run.folder / f"{name}.parquet"
            problem = Problem(path, f"{brief(error, run.folder)}; the rest is shown", lost=False)
            if problem not in self.problems:
                self.problems.append(problem)
            return None
