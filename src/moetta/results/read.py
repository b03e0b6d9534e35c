"""Reading results folders: what can be read is returned, what cannot is named."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from moetta.results.runs import Run, find_runs, load_run

# The columns without which a file is of no use.
COLUMNS = {
    "steps": ("step", "samples", "correct"),
    "domains": ("domain", "quarter", "samples", "correct"),
    "experts": ("step_bucket", "layer", "domain", "expert", "count"),
    "similarity": ("step", "layer", "weight_cosine", "bias_cosine"),
}
EVERY_RUN_HAS = ("steps", "domains")


@dataclass(frozen=True)
class Failure:
    """A folder, or a file in one, that could not be used.

    Attributes:
        path: Which.
        reason: Why, and what to do.
        lost: Whether the whole run is missing from the report.
    """

    path: Path
    reason: str
    lost: bool = True


def load(paths: Iterable[Path]) -> tuple[list[Run], list[Failure]]:
    """All finished runs below the given folders, and what could not be read.

    Raises:
        FileNotFoundError: A path is not a folder.
    """
    runs: list[Run] = []
    failures: list[Failure] = []
    for folder in find_runs(paths):
        try:
            run = load_run(folder)
        except FileNotFoundError:
            reason = "unfinished: it has no summary.json; the command that began it resumes it"
            failures.append(Failure(folder, reason))
        except (ValueError, OSError) as error:
            failures.append(Failure(folder, _brief(error, folder)))
        else:
            runs.append(run)
            failures += _damaged_frames(run)
    return runs, failures


def frame(run: Run, name: str) -> pl.DataFrame | None:
    """A table of a run; None where it has none that can be used."""
    try:
        return _frame(run, name)
    except (ValueError, OSError):
        return None


def _damaged_frames(run: Run) -> list[Failure]:
    failures = []
    for name in COLUMNS:
        path = run.folder / f"{name}.parquet"
        if not path.exists() and name not in EVERY_RUN_HAS:
            continue
        try:
            _frame(run, name)
        except FileNotFoundError:
            failures.append(Failure(path, "missing; the rest of the run is shown", lost=False))
        except (ValueError, OSError) as error:
            reason = f"{_brief(error, run.folder)}; the rest of the run is shown"
            failures.append(Failure(path, reason, lost=False))
    return failures


def _brief(error: Exception, folder: Path) -> str:
    """The message without the folder's path, which the reader has already."""
    return str(error).replace(f"{folder}{os.sep}", "").splitlines()[0]


def _frame(run: Run, name: str) -> pl.DataFrame:
    found = run.frame(name)
    missing = [column for column in COLUMNS[name] if column not in found.columns]
    if missing:
        raise ValueError(f"it lacks the columns {', '.join(missing)}")
    if found.is_empty():
        raise ValueError("it has no rows")
    return found
