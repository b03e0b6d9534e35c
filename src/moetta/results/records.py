"""Groups of runs as plain records: to list, filter, sort and print as JSON."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moetta.results.groups import BASELINE, Group, aggregate, make_group, told_apart
from moetta.results.runs import Run
from moetta.suggest import nearest

Record = dict[str, Any]

FIELDS: dict[str, Callable[[Run], str]] = {
    "method": lambda run: run.method,
    "variant": lambda run: run.variant or "",
    "stream": lambda run: run.stream,
    "model": lambda run: run.model,
    "seed": lambda run: str(run.seed),
    "experiment": lambda run: str(run.card.get("experiment") or ""),
}
"""What runs can be filtered by."""


def filter_runs(runs: Sequence[Run], text: str) -> list[Run]:
    """The runs that match field=text: exactly if any does, else in part.

    Raises:
        ValueError: There is no such field, or no run matches.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--filter takes field=text, such as method=moetta, got {text!r}")
    if name not in FIELDS:
        raise ValueError(f"no field {name!r} to filter by; {nearest(name, FIELDS)}")
    exact = [run for run in runs if FIELDS[name](run) == value]
    found = exact or [run for run in runs if value in FIELDS[name](run)]
    if not found:
        there = sorted({FIELDS[name](run) for run in runs} - {""})
        raise ValueError(f"--filter {text}: {_no_such(name, value, there)}")
    return found


def _no_such(what: str, value: str, there: Sequence[str]) -> str:
    if not there:
        return f"no run has any {what}"
    hint = nearest(value, there)
    listed = f"valid: {', '.join(there)}"
    return f"no run has {what} {value!r}; {hint}" + ("" if hint == listed else f" ({listed})")


def records(
    runs: Iterable[Run],
    against: str = BASELINE,
    among: Iterable[Run] | None = None,
    *,
    along: bool = False,
) -> list[Record]:
    """One record per group of seeds; accuracies in %, differences in points.

    Args:
        runs: The runs to show.
        against: The method whose accuracy is subtracted, seed by seed.
        among: Where to look for that method's runs; by default among those shown.
        along: Also give the gain over the source model by quarter of the stream, and the best stop.

    Raises:
        ValueError: There is no run of the method to compare with.
    """
    runs = list(runs)
    among = runs if among is None else list(among)
    plain = sorted({run.method for run in among if run.variant is None} | {BASELINE})
    if against not in plain:
        raise ValueError(f"--against: {_no_such('method', against, plain)}")
    rivals = {
        (run.protocol, run.seed): run.accuracy
        for run in among
        if run.method == against and run.variant is None
    }
    groups = aggregate(runs)
    rows = [_record(group, rivals, against) for group in groups]
    if along:
        for row, group in zip(rows, groups, strict=True):
            row |= _along(group, among)
    keys = [group.first.protocol for group in groups]
    _mark(rows, "protocol_differs", ("model", "stream", "images"), keys, json.loads)
    settings = [group.first.settings for group in groups]
    _mark(rows, "config_differs", ("protocol", "method", "variant"), settings, lambda same: same)
    return rows


def _mark(
    rows: list[Record],
    field: str,
    alike: Sequence[str],
    settings: Sequence[Any],
    read: Callable[[Any], dict[str, Any]],
) -> None:
    """Say in a field how rows differ that are alike in some other fields."""
    families: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault(tuple(row[name] for name in alike), []).append(place)
    for places in families.values():
        members = [settings[place] for place in places]
        if all(member == members[0] for member in members):
            continue
        for place, text in zip(places, told_apart([*map(read, members)]), strict=True):
            rows[place][field] = text or None


def _record(group: Group, rivals: dict[tuple[str, int], float], against: str) -> Record:
    first = group.first
    gaps = [
        run.accuracy - rivals[run.protocol, run.seed]
        for run in group.runs
        if (run.protocol, run.seed) in rivals
    ]
    gain = statistics.fmean(gaps) if gaps else None
    if gain is None and against == BASELINE:
        # Each run also measured the source model, on some of its batches.
        own = group.stat("gain", scale=100, complete=True)
        gain = None if own is None else own.mean
    time = group.stat("cost", "time_ratio", complete=True)
    return {
        "model": first.model,
        "stream": first.stream,
        "images": int(first.summary["samples"]),
        "protocol": hashlib.sha256(first.protocol.encode()).hexdigest()[:8],
        "protocol_differs": None,
        "method": first.method,
        "variant": first.variant,
        "config_differs": None,
        "accuracy": group.accuracy.mean,
        "sd": group.accuracy.sd,
        "worst": group.accuracy.lowest,
        "seeds": len(group.runs),
        "collapses": group.collapses,
        "gain": gain,
        "time": None if time is None else time.mean,
        "by_domain": _by_domain(group),
    }


def _along(group: Group, among: Iterable[Run]) -> Record:
    import numpy as np  # with what reads the steps, it costs too much where it is not asked for

    from moetta.results.courses import best_stop, course, quarters

    protocol = group.first.protocol
    plain = [r for r in among if (r.method, r.variant, r.protocol) == (BASELINE, None, protocol)]
    found = course(group, make_group(plain) if plain else None)
    if group.first.method == BASELINE or found is None or np.isnan(found.mean.gain).all():
        return {"quarters": None, "best_stop": None}
    return {"quarters": quarters(found.mean), "best_stop": best_stop(found.mean)}


def _by_domain(group: Group) -> dict[str, float]:
    domains = group.first.summary.get("by_domain")
    names = domains if isinstance(domains, dict) else {}
    found = {
        name: group.stat("by_domain", name, "accuracy", scale=100, complete=True) for name in names
    }
    return {name: stat.mean for name, stat in found.items() if stat is not None}


def sort_records(rows: Sequence[Record], column: str) -> list[Record]:
    """Records sorted by a column, best first; those without a value come last.

    Raises:
        ValueError: There is no such column.
    """
    columns = [name for name in rows[0] if name not in ("by_domain", "quarters")]
    if column not in columns:
        raise ValueError(f"no column {column!r} to sort by; {nearest(column, columns)}")
    text = column in ("model", "stream", "method", "variant")
    low_first = text or column in ("sd", "time", "collapses")
    present = [row for row in rows if row[column] is not None]
    absent = [row for row in rows if row[column] is None]
    return sorted(present, key=lambda row: row[column], reverse=not low_first) + absent


def by_protocol(rows: Sequence[Record]) -> list[list[Record]]:
    """Records that may be compared with each other, in one list per protocol."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row["protocol"], []).append(row)
    return list(found.values())


def record_title(row: Record) -> str:
    """What a record's table is about: model, stream, number of images."""
    tail = f" ({row['protocol_differs']})" if row["protocol_differs"] else ""
    return f"{row['model']}, {row['stream']}, {row['images']:,} images{tail}"


def record_label(row: Record) -> str:
    """A record's row: method, variant and the settings that set it apart."""
    differs = row["config_differs"] and f"({row['config_differs']})"
    return " ".join(part for part in (row["method"], row["variant"], differs) if part)
