"""`moetta results`: what there is, in a table in the terminal."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from moetta.bench.display import make_console
from moetta.bench.results import Group, Run, aggregate, load_runs
from moetta.config import nearest


@dataclass(frozen=True)
class Results:
    """Show finished runs: means over seeds, worst seed, collapses, cost."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders of results."""
    filter: tuple[str, ...] = ()
    """Keep what matches, as in method=moetta stream=potpourri+ (a part of the name is enough)."""
    sort: str = "accuracy"
    """Column to sort by: accuracy, sd, worst, collapses, gain, time, method, stream or model."""
    against: str = "noadapt"
    """Method that the column of differences compares with, seed by seed."""
    by_domain: bool = False
    """Show the accuracy in each domain instead."""
    json: bool = False
    """Print JSON for machines."""


def results(options: Results) -> None:
    """Print the table; say what could not be read."""
    runs, problems = load_runs(options.runs)
    for problem in problems:
        print(f"not shown: {problem}", file=sys.stderr)
    for text in options.filter:
        runs = _filtered(runs, text)
    if not runs:
        raise ValueError(f"no finished runs in {', '.join(map(str, options.runs))} to show")
    rows = _sorted(records(runs, options.against), options.sort)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    shown = [domains_table(runs)] if options.by_domain else _as_tables(rows, options.against)
    make_console().print(*shown)


_FIELDS: dict[str, Callable[[Run], str]] = {
    "method": lambda run: run.method,
    "variant": lambda run: run.variant or "",
    "stream": lambda run: run.stream,
    "model": lambda run: run.model,
    "seed": lambda run: str(run.seed),
    "experiment": lambda run: str(run.card.get("experiment") or ""),
}


def _filtered(runs: list[Run], text: str) -> list[Run]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--filter takes field=text, as in method=moetta, not {text!r}")
    if name not in _FIELDS:
        raise ValueError(f"no field {name!r} to filter by; {nearest(name, _FIELDS)}")
    exact = [run for run in runs if _FIELDS[name](run) == value]
    return exact or [run for run in runs if value in _FIELDS[name](run)]


def records(runs: Iterable[Run], against: str = "noadapt") -> list[dict[str, Any]]:
    """One record for each group of seeds; accuracies in per cent, differences in points."""
    runs = list(runs)
    rivals = {
        (run.protocol, run.seed): run.accuracy
        for run in runs
        if run.method == against and run.variant is None
    }
    return [_record(group, rivals, against) for group in aggregate(runs)]


def _record(group: Group, rivals: dict[tuple[str, int], float], against: str) -> dict[str, Any]:
    first = group.first
    gaps = [
        run.accuracy - rivals[run.protocol, run.seed]
        for run in group.runs
        if (run.protocol, run.seed) in rivals
    ]
    gain = statistics.fmean(gaps) if gaps else None
    if gain is None and against == "noadapt" and (own := group.average("gain")) is not None:
        gain = 100 * own  # each run saw the source model on some batches
    return {
        "model": first.model,
        "stream": first.stream,
        "images": int(first.summary.get("samples", 0)),
        "method": first.method,
        "variant": first.variant,
        "accuracy": group.mean,
        "sd": group.sd,
        "worst": group.worst,
        "seeds": len(group.runs),
        "collapses": group.collapses,
        "gain": gain,
        "time": group.average("cost", "time_ratio"),
    }


def _sorted(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    if column not in rows[0]:
        raise ValueError(f"no column {column!r} to sort by; {nearest(column, rows[0])}")
    text = column in ("model", "stream", "method", "variant")
    low_first = text or column in ("sd", "time", "collapses")
    present = [row for row in rows if row[column] is not None]
    absent = [row for row in rows if row[column] is None]
    return sorted(present, key=lambda row: row[column], reverse=not low_first) + absent


def _as_tables(rows: Sequence[dict[str, Any]], against: str) -> list[Table]:
    """One table for each model, stream and number of images: what may be compared at a glance."""
    tables: dict[tuple[str, str, int], Table] = {}
    for row in rows:
        key = (row["model"], row["stream"], row["images"])
        if key not in tables:
            title = f"{row['model']}, {row['stream']}, {row['images']:,} images"
            table = tables[key] = Table(title=title, title_justify="left")
            table.add_column("method", overflow="fold")
            for name in ("accuracy %", f"vs {against}", "worst", "seeds", "collapses", "time x"):
                table.add_column(name, justify="right")
        sd = "" if row["sd"] is None else f" ± {row['sd']:.2f}"
        tables[key].add_row(
            row["method"] if row["variant"] is None else f"{row['method']} {row['variant']}",
            f"{row['accuracy']:.2f}{sd}",
            "" if row["gain"] is None else f"{row['gain']:+.2f}",
            f"{row['worst']:.2f}",
            str(row["seeds"]),
            str(row["collapses"] or ""),
            "" if row["time"] is None else f"{row['time']:.2f}",
        )
    return list(tables.values())


def groups_tables(runs: Sequence[Run]) -> list[Table]:
    """The runs as `moetta results` shows them, best first."""
    return _as_tables(_sorted(records(runs), "accuracy"), "noadapt")


def domains_table(runs: Sequence[Run]) -> Table:
    """Accuracy in each domain, one column a group of seeds."""
    groups = aggregate(runs)
    names = list(dict.fromkeys(n for run in runs for n in run.summary.get("by_domain", {})))
    table = Table("domain")
    for group in groups:
        first = group.first
        parts = [first.method, first.variant, first.stream, first.model]
        table.add_column(" ".join(p for p in parts if p), justify="right", overflow="fold")
    for name in names:
        cells = [group.average("by_domain", name, "accuracy") for group in groups]
        table.add_row(name, *("" if c is None else f"{100 * c:.2f}" for c in cells))
    return table
