"""`moetta results`: what there is, in a table in the terminal."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.markup import escape
from rich.table import Table

from moetta.commands.display import make_console
from moetta.results.runs import Group, Run, aggregate, load_runs, told_apart
from moetta.suggest import nearest


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
    if not runs:
        raise ValueError(f"no finished runs in {', '.join(map(str, options.runs))} to show")
    plain = sorted({run.method for run in runs if run.variant is None} | {"noadapt"})
    if options.against not in plain:
        raise ValueError(f"--against: {_no_such('method', options.against, plain)}")
    chosen = runs
    for text in options.filter:
        chosen = _filtered(chosen, text)
    rows = _sorted(records(chosen, options.against, among=runs), options.sort)
    if options.json:
        if not options.by_domain:
            rows = [{k: v for k, v in row.items() if k != "by_domain"} for row in rows]
        print(json.dumps(rows, indent=2))
        return
    shown = _domain_tables(rows) if options.by_domain else _as_tables(rows, options.against)
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
    found = exact or [run for run in runs if value in _FIELDS[name](run)]
    if not found:
        there = sorted({_FIELDS[name](run) for run in runs} - {""})
        raise ValueError(f"--filter {text}: {_no_such(name, value, there)}")
    return found


def _no_such(what: str, value: str, there: Sequence[str]) -> str:
    if not there:
        return f"no run has any {what}"
    hint = nearest(value, there)
    listed = f"valid: {', '.join(there)}"
    return f"no run has {what} {value!r}; {hint}" + ("" if hint == listed else f" ({listed})")


def records(
    runs: Iterable[Run], against: str = "noadapt", among: Iterable[Run] | None = None
) -> list[dict[str, Any]]:
    """One record for each group of seeds; accuracies in per cent, differences in points.

    Args:
        runs: what to show.
        against: the method whose accuracy is taken off, seed by seed.
        among: where that method's runs are; among those shown by default.
    """
    runs = list(runs)
    rivals = {
        (run.protocol, run.seed): run.accuracy
        for run in (runs if among is None else among)
        if run.method == against and run.variant is None
    }
    groups = aggregate(runs)
    rows = [_record(group, rivals, against) for group in groups]
    protocols = [json.loads(group.first.protocol) for group in groups]
    _mark(rows, "protocol_differs", ("model", "stream", "images"), protocols)
    settings = [group.first.settings for group in groups]
    _mark(rows, "config_differs", ("protocol", "method", "variant"), settings)
    return rows


def _mark(
    rows: list[dict[str, Any]], field: str, alike: Sequence[str], settings: list[dict[str, Any]]
) -> None:
    """Say in a field what tells rows apart that are alike in some others."""
    families: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault(tuple(row[name] for name in alike), []).append(place)
    for places in families.values():
        texts = told_apart([settings[place] for place in places])
        for place, text in zip(places, texts, strict=True):
            rows[place][field] = text or None


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
        "images": int(first.summary["samples"]),
        "protocol": hashlib.sha256(first.protocol.encode()).hexdigest()[:8],
        "protocol_differs": None,
        "method": first.method,
        "variant": first.variant,
        "config_differs": None,
        "accuracy": group.mean,
        "sd": group.sd,
        "worst": group.worst,
        "seeds": len(group.runs),
        "collapses": group.collapses,
        "gain": gain,
        "time": group.average("cost", "time_ratio"),
        "by_domain": _by_domain(group),
    }


def _by_domain(group: Group) -> dict[str, float]:
    domains = group.first.summary.get("by_domain")
    names = domains if isinstance(domains, dict) else {}
    found = {name: group.average("by_domain", name, "accuracy") for name in names}
    return {name: 100 * value for name, value in found.items() if value is not None}


def _sorted(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    columns = [name for name in rows[0] if name != "by_domain"]
    if column not in columns:
        raise ValueError(f"no column {column!r} to sort by; {nearest(column, columns)}")
    text = column in ("model", "stream", "method", "variant")
    low_first = text or column in ("sd", "time", "collapses")
    present = [row for row in rows if row[column] is not None]
    absent = [row for row in rows if row[column] is None]
    return sorted(present, key=lambda row: row[column], reverse=not low_first) + absent


def _title(row: dict[str, Any]) -> str:
    tail = f" ({row['protocol_differs']})" if row["protocol_differs"] else ""
    return escape(f"{row['model']}, {row['stream']}, {row['images']:,} images{tail}")


def _label(row: dict[str, Any]) -> str:
    differs = row["config_differs"] and f"({row['config_differs']})"
    return escape(" ".join(part for part in (row["method"], row["variant"], differs) if part))


def _by_protocol(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What may be compared at a glance, each in a table of its own."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["protocol"], []).append(row)
    return list(found.values())


def _as_tables(rows: Sequence[dict[str, Any]], against: str) -> list[Table]:
    tables = []
    for members in _by_protocol(rows):
        table = Table(title=_title(members[0]), title_justify="left")
        table.add_column("method", overflow="fold")
        for name in ("accuracy %", f"vs {against}", "worst", "seeds", "collapses", "time x"):
            table.add_column(name, justify="right")
        for row in members:
            sd = "" if row["sd"] is None else f" ± {row['sd']:.2f}"
            table.add_row(
                _label(row),
                f"{row['accuracy']:.2f}{sd}",
                "" if row["gain"] is None else f"{row['gain']:+.2f}",
                f"{row['worst']:.2f}",
                str(row["seeds"]),
                str(row["collapses"] or ""),
                "" if row["time"] is None else f"{row['time']:.2f}",
            )
        tables.append(table)
    return tables


def groups_tables(runs: Sequence[Run]) -> list[Table]:
    """The runs as `moetta results` shows them, best first."""
    return _as_tables(_sorted(records(runs), "accuracy"), "noadapt")


def _domain_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy in each domain, one column a group of seeds."""
    tables = []
    for members in _by_protocol(rows):
        table = Table("domain", title=_title(members[0]), title_justify="left")
        for row in members:
            table.add_column(_label(row), justify="right", overflow="fold")
        for name in dict.fromkeys(name for row in members for name in row["by_domain"]):
            cells = [row["by_domain"].get(name) for row in members]
            table.add_row(name, *("" if c is None else f"{c:.2f}" for c in cells))
        tables.append(table)
    return tables
