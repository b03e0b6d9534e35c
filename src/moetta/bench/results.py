"""Reading results: runs from folders, and what several seeds say together."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from moetta.bench.protocol import SCHEMA


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
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


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
        values = []
        for run in self.runs:
            value: Any = run.summary
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is None:
                return None
            values.append(float(value))
        return statistics.fmean(values)


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
        config = {k: v for k, v in run.card["config"].items() if k != "seed"}
        key = (run.protocol, run.method, run.variant or "", json.dumps(config, sort_keys=True))
        found.setdefault(key, []).append(run)
    return [group(members) for members in found.values()]


def protocol_key(card: dict[str, Any]) -> str:
    """What of a card must agree for two runs to be comparable: its protocol, whatever the seed."""
    protocol = copy.deepcopy(card["protocol"])
    stream = protocol["stream"]
    stream.pop("seed", None)
    if stream.get("limit") is not None:  # which images a subset takes depends on the seed
        for domain in stream.get("domains", ()):
            domain.pop("samples", None)
    return json.dumps(protocol, sort_keys=True)


def load_run(folder: Path) -> Run:
    """One finished run.

    Raises:
        FileNotFoundError: the folder holds no finished run.
        ValueError: a file of it is damaged or of another schema.
    """
    if not (folder / "summary.json").is_file():
        raise FileNotFoundError(f"{folder} holds no finished run")
    parts = {}
    for name in ("card", "summary"):
        path = folder / f"{name}.json"
        try:
            parts[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        schema = parts[name].get("schema") if isinstance(parts[name], dict) else None
        if schema != SCHEMA:
            raise ValueError(f"{path} has schema {schema}; this moetta reads {SCHEMA}")
    run = Run(folder, parts["card"], parts["summary"])
    try:
        _ = (run.method, run.model, run.stream, run.seed, run.accuracy, run.protocol)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} lacks {error} in its card or summary") from error
    return run


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All finished runs in these folders or their subfolders, and what could not be read.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no results folder {path}")
        folders = sorted(p.parent for p in path.rglob("card.json"))
        strays = sorted({p.parent for p in path.rglob("summary.json")} - set(folders))
        for folder in folders:
            if not (folder / "summary.json").exists():
                problems.append(f"{folder} is unfinished")
                continue
            try:
                runs.append(load_run(folder))
            except ValueError as error:
                problems.append(str(error))
        problems += [f"{folder} has a summary but no card" for folder in strays]
    return runs, problems
