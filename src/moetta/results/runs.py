"""Runs on disk: finding them, reading them, and naming those that cannot be read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetta.suggest import nearest_path

if TYPE_CHECKING:  # polars takes a third of a second to import; summaries do not need it
    import polars as pl

SCHEMA = 1
"""Schema of the files of a run; any other is refused."""
EARLY_STOP = "checkpoint/early-stop.json"
"""In the folder of a run that was stopped early, and has no result."""
# What every card and summary must have, by its keys from the outside in.
CARD: dict[tuple[str, ...], Any] = {
    ("method",): str,
    ("variant",): str | None,
    ("config",): dict,
    ("seed",): int,
    ("protocol", "model", "name"): str,
    ("protocol", "stream", "stream"): str,
}
SUMMARY: dict[tuple[str, ...], Any] = {("accuracy",): int | float, ("samples",): int}
# The columns that each table of a run must have.
COLUMNS = {
    "steps": ("step", "samples", "correct"),
    "domains": ("domain", "quarter", "samples", "correct"),
    "experts": ("step_bucket", "layer", "domain", "expert", "count"),
    "similarity": ("step", "layer", "weight_cosine", "bias_cosine"),
}


@dataclass(frozen=True)
class Problem:
    """A run, or a file of one, that could not be used.

    Attributes:
        path: The folder or the file.
        reason: What is wrong with it.
        lost: Whether the whole run is missing, not just one of its files.
    """

    path: Path
    reason: str
    lost: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        folder: Where it is.
        card: What was run.
        summary: What came out.
    """

    folder: Path
    card: dict[str, Any]
    summary: dict[str, Any]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.card["method"])

    @property
    def title(self) -> str:
        """The method's name as people write it; older cards know only the plain name."""
        title = self.card.get("title")
        return title if isinstance(title, str) and title else self.method

    @property
    def drawn(self) -> Mapping[str, str]:
        """How the method asks to be drawn: a color and a marker; empty on older cards."""
        drawn = self.card.get("drawn")
        return drawn if isinstance(drawn, Mapping) else {}

    @property
    def variant(self) -> str | None:
        """The name of its overrides."""
        found: str | None = self.card.get("variant")
        return found

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.card["protocol"]["model"]["name"])

    @property
    def stream(self) -> str:
        """The stream's name."""
        return str(self.card["protocol"]["stream"]["stream"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.card["seed"])

    @property
    def accuracy(self) -> float:
        """Accuracy in %."""
        return 100 * float(self.summary["accuracy"])

    @property
    def settings(self) -> dict[str, Any]:
        """The method's configuration without the seed."""
        return {name: value for name, value in self.card["config"].items() if name != "seed"}

    @cached_property
    def protocol(self) -> str:
        """What another run must share to be comparable; see `protocol_key`."""
        return protocol_key(self.card)

    @cached_property
    def group_key(self) -> tuple[str, ...]:
        """What runs that differ only in the seed have in common."""
        settings = json.dumps(self.settings, sort_keys=True)
        return (self.protocol, self.method, self.variant or "", settings)

    def frame(self, name: str) -> pl.DataFrame:
        """A table of the run: steps, domains, experts or similarity.

        Raises:
            FileNotFoundError: This run does not have it.
            ValueError: The file is damaged, lacks columns or has no rows.
        """
        import polars as pl

        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            found = pl.read_parquet(path)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        missing = [column for column in COLUMNS.get(name, ()) if column not in found.columns]
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
        if found.is_empty():
            raise ValueError(f"{path} has no rows")
        return found


def number(run: Run, *path: str) -> float | None:
    """A number from the summary, found by its keys, outermost first; None if absent or not finite.

    >>> number(Run(Path(), {}, {"cost": {"seconds": 2}}), "cost", "seconds")
    2.0
    """
    value = _inside(run.summary, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _inside(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def protocol_key(card: Mapping[str, Any]) -> str:
    """The part of a card that comparable runs share: the protocol without the seed."""
    stream = {k: v for k, v in card["protocol"]["stream"].items() if k != "seed"}
    # Which images a subset takes depends on the seed.
    if stream.get("limit") is not None or stream.get("length") is not None:
        stream["domains"] = [
            {k: v for k, v in domain.items() if k != "samples"}
            for domain in stream.get("domains", ())
        ]
    return json.dumps({**card["protocol"], "stream": stream}, sort_keys=True)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders at or below the given folders, sorted, without repetition.

    Raises:
        FileNotFoundError: A path does not exist or is not a folder.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else f"does not exist{nearest_path(path)}"
            raise FileNotFoundError(f"{path} {what}; name results folders, such as runs/")
        for folder, inner, files in os.walk(path):
            if "card.json" in files or "summary.json" in files or "checkpoint" in inner:
                found.setdefault(Path(folder).resolve(), Path(folder))
                inner.clear()  # runs do not contain runs
            inner[:] = sorted(name for name in inner if not name.startswith("."))
    return sorted(found.values())


def load_run(folder: Path) -> Run:
    """One finished run.

    Raises:
        FileNotFoundError: The folder does not hold a finished run.
        ValueError: One of its files is damaged or has another schema; names the file.
    """
    if not (folder / "summary.json").is_file():
        raise FileNotFoundError(f"{folder} does not hold a finished run")
    summary = _read(folder / "summary.json", SUMMARY)
    if not 0 <= summary["accuracy"] <= 1:
        wrong = summary["accuracy"]
        raise ValueError(f"{folder / 'summary.json'}: accuracy must be from 0 to 1, got {wrong}")
    return Run(folder, load_card(folder), summary)


def load_card(folder: Path) -> dict[str, Any]:
    """A run's card, finished or not.

    Raises:
        ValueError: It is missing, damaged or has another schema.
    """
    card = _read(folder / "card.json", CARD)
    domains = card["protocol"]["stream"].get("domains", [])
    if not isinstance(domains, list) or not all(isinstance(d, dict) for d in domains):
        raise ValueError(
            f"{folder / 'card.json'}: protocol.stream.domains must be a list of objects"
        )
    return card


def _read(path: Path, needed: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    if (schema := _inside(found, ["schema"])) != SCHEMA:
        raise ValueError(f"{path} has schema {schema}; this version of moetta reads {SCHEMA}")
    for keys, kind in needed.items():
        value = _inside(found, keys)
        if not isinstance(value, kind):
            what = "lacks" if value is None else "has the wrong type for"
            raise ValueError(f"{path} {what} {'.'.join(keys)}")
    return found


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[Problem]]:
    """All finished runs at or below these folders, and the folders that were left out.

    A run that was repeated counts once: the newest.

    Raises:
        FileNotFoundError: A path does not exist or is not a folder.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    for folder in find_runs(paths):
        try:
            runs.append(load_run(folder))
        except FileNotFoundError:
            reason = "unfinished; repeat the command that started it to resume"
            if (folder / EARLY_STOP).is_file():
                reason = "stopped early; repeat the command without --early-stop to finish it"
            problems.append(Problem(folder, reason))
        except ValueError as error:
            problems.append(Problem(folder, brief(error, folder)))
    kept, repeats = newest(runs)
    for old, new in repeats:
        problems.append(Problem(old.folder, f"not counted: {new.folder.name} repeats it"))
    return kept, problems


def newest(runs: Iterable[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """The newest of repeated runs, and the older ones, each with the one that replaces it."""
    last: dict[tuple[tuple[str, ...], int], Run] = {}
    runs = list(runs)
    for run in sorted(runs, key=lambda run: str(run.card.get("created") or "")):
        last[run.group_key, run.seed] = run
    pairs = [(run, last[run.group_key, run.seed]) for run in runs]
    return [a for a, b in pairs if a is b], [(a, b) for a, b in pairs if a is not b]


def brief(error: Exception, folder: Path) -> str:
    """The first line of a message, without the folder, which the reader already knows."""
    return str(error).replace(f"{folder}{os.sep}", "").splitlines()[0]
