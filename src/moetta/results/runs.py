"""Reading results: runs from folders, and what several seeds say together."""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from moetta.suggest import nearest_path

SCHEMA = 1
"""Of the files of a run; others are refused by name."""
SHOWN_DIFFERENCES = 6
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


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: where it is.
        card: what was run.
        summary: what came out.
    """

    folder: Path
    card: dict[str, Any]
    summary: dict[str, Any]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.card["method"])

    @property
    def variant(self) -> str | None:
        """What its overrides are called."""
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
        """Per cent of right answers."""
        return 100 * float(self.summary["accuracy"])

    @property
    def settings(self) -> dict[str, Any]:
        """The method's configuration, whatever the seed."""
        return {name: value for name, value in self.card["config"].items() if name != "seed"}

    @cached_property
    def protocol(self) -> str:
        """What it can be compared with; see `protocol_key`."""
        return protocol_key(self.card)

    def frame(self, name: str) -> pl.DataFrame:
        """A table of the run: steps, domains, experts or similarity.

        Raises:
            FileNotFoundError: this run has none.
            ValueError: the file is damaged.
        """
        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}")
        try:
            return pl.read_parquet(path)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed; accuracies in per cent.

    Attributes:
        runs: the runs, by seed.
        mean: mean accuracy.
        sd: unbiased standard deviation; None for a single run.
        worst: the worst seed's accuracy.
        collapses: runs that ended below half of noadapt.
    """

    runs: tuple[Run, ...]
    mean: float
    sd: float | None
    worst: float
    collapses: int

    @property
    def first(self) -> Run:
        """One of them, for what they have in common."""
        return self.runs[0]

    def average(self, *path: str) -> float | None:
        """Mean of a figure of the summaries; None where a run lacks it."""
        values = [v for run in self.runs if (v := number(run, *path)) is not None]
        return statistics.fmean(values) if len(values) == len(self.runs) else None


def number(run: Run, *path: str) -> float | None:
    """A figure of the summary, found by its keys from the outside in; None if absent or not finite.

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


def group(runs: Sequence[Run]) -> Group:
    """What several seeds say together."""
    if not runs:
        raise ValueError("there are no runs to take a mean of")
    scores = [run.accuracy for run in runs]
    return Group(
        runs=tuple(sorted(runs, key=lambda run: run.seed)),
        mean=statistics.fmean(scores),
        sd=statistics.stdev(scores) if len(scores) > 1 else None,
        worst=min(scores),
        collapses=sum(bool(run.summary.get("collapsed")) for run in runs),
    )


def aggregate(runs: Iterable[Run]) -> list[Group]:
    """Runs put together that differ in the seed alone, in order of appearance."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(_cell(run), []).append(run)
    return [group(members) for members in found.values()]


def _cell(run: Run) -> tuple[str, ...]:
    """What runs that differ in the seed alone have in common."""
    settings = json.dumps(run.settings, sort_keys=True)
    return (run.protocol, run.method, run.variant or "", settings)


def newest(runs: Iterable[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """Each cell and seed once, the last made; and the others, each with the one that counts."""
    last: dict[tuple[tuple[str, ...], int], Run] = {}
    runs = list(runs)
    for run in sorted(runs, key=lambda run: str(run.card.get("created") or "")):
        last[_cell(run), run.seed] = run
    kept = [run for run in runs if last[_cell(run), run.seed] is run]
    pairs = [(run, last[_cell(run), run.seed]) for run in runs]
    return kept, [(run, counts) for run, counts in pairs if run is not counts]


def protocol_key(card: dict[str, Any]) -> str:
    """What of a card must agree for two runs to be comparable: its protocol, whatever the seed."""
    protocol = copy.deepcopy(card["protocol"])
    stream = protocol["stream"]
    stream.pop("seed", None)
    if stream.get("limit") is not None:  # which images a subset takes depends on the seed
        for domain in stream.get("domains", ()):
            domain.pop("samples", None)
    return json.dumps(protocol, sort_keys=True)


def differences(a: Run, b: Run) -> str:
    """The names and values in which two protocols differ."""
    mine, theirs = (dict(_flat(json.loads(run.protocol))) for run in (a, b))
    names = [n for n in sorted({*mine, *theirs}) if mine.get(n) != theirs.get(n)]
    return _listed([f"{n} ({_short(mine.get(n))} / {_short(theirs.get(n))})" for n in names])


def told_apart(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several settings, the names in which not all agree, with its own values.

    >>> told_apart([{"lr": 0.1, "k": {"n": 1}}, {"lr": 0.2, "k": {"n": 1}}])
    ['lr=0.1', 'lr=0.2']
    """
    flat = [dict(_flat(setting)) for setting in settings]
    names = dict.fromkeys(name for values in flat for name in values)
    differ = [n for n in names if any(values.get(n) != flat[0].get(n) for values in flat)]
    return [_listed([f"{n}={_short(values.get(n))}" for n in differ]) for values in flat]


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - SHOWN_DIFFERENCES
    return ", ".join(parts[:SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            inner = item.get("name", place) if isinstance(item, Mapping) else place
            yield from _flat(item, f"{name}[{inner}]")
    else:
        yield name, value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}…"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders among and below the given folders, sorted, each once.

    Raises:
        FileNotFoundError: a path does not exist or is not a folder.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else f"does not exist{nearest_path(path)}"
            raise FileNotFoundError(f"{path} {what}; name results folders, such as runs/")
        for folder, inner, files in os.walk(path):
            if "card.json" in files or "summary.json" in files or "checkpoint" in inner:
                found.setdefault(Path(folder).resolve(), Path(folder))
                inner.clear()  # what lies in a run is its own
            inner[:] = sorted(name for name in inner if not name.startswith("."))
    return sorted(found.values())


def load_run(folder: Path) -> Run:
    """One finished run.

    Raises:
        FileNotFoundError: the folder holds no finished run.
        ValueError: a file of it is damaged or of another schema; names the file.
    """
    if not (folder / "summary.json").is_file():
        raise FileNotFoundError(f"{folder} holds no finished run")
    summary = _read(folder / "summary.json", SUMMARY)
    if not 0 <= summary["accuracy"] <= 1:
        wrong = summary["accuracy"]
        raise ValueError(f"{folder / 'summary.json'}: accuracy must lie in 0 to 1, not {wrong}")
    return Run(folder, load_card(folder), summary)


def load_card(folder: Path) -> dict[str, Any]:
    """A run's card, finished or not.

    Raises:
        ValueError: it is missing, damaged or of another schema.
    """
    card = _read(folder / "card.json", CARD)
    domains = card["protocol"]["stream"].get("domains", [])
    if not isinstance(domains, list) or not all(isinstance(d, dict) for d in domains):
        raise ValueError(f"{folder / 'card.json'}: protocol.stream.domains is no list of domains")
    return card


def _read(path: Path, needed: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if (schema := _inside(found, ["schema"])) != SCHEMA:
        raise ValueError(f"{path} has schema {schema}; this moetta reads {SCHEMA}")
    for keys, kind in needed.items():
        value = _inside(found, keys)
        if not isinstance(value, kind):
            what = "lacks" if value is None else "has a wrong"
            raise ValueError(f"{path} {what} {'.'.join(keys)}")
    return found


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All finished runs among and below these folders, and what is not among them, with reasons.

    A cell that was run twice counts once, the newest.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in find_runs(paths):
        try:
            runs.append(load_run(folder))
        except FileNotFoundError:
            problems.append(f"{folder} is unfinished")
        except ValueError as error:
            problems.append(str(error))
    kept, repeats = newest(runs)
    for old, new in repeats:
        problems.append(f"{old.folder} is not counted: the same cell is in {new.folder}, newer")
    return kept, problems
