"""`moetta results`: finished runs as tables in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from moetta.results.records import (
    Record,
    by_protocol,
    filter_runs,
    record_label,
    record_title,
    records,
    sort_records,
)
from moetta.results.runs import Run, load_runs

if TYPE_CHECKING:  # --json does not need it
    from rich.table import Table


@dataclass(frozen=True)
class Results:
    """Show finished runs: mean over seeds, worst seed, collapses, cost."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Results folders."""
    filter: tuple[str, ...] = ()
    """Show only runs that match, such as method=moetta stream=potpourri+ (part of a name is
    enough)."""
    sort: str = "accuracy"
    """Column to sort by: accuracy, sd, worst, collapses, gain, time, method, stream or model."""
    against: str = "noadapt"
    """Method to compare with, seed by seed."""
    by_domain: bool = False
    """Show the accuracy in each domain instead."""
    along: bool = False
    """Show the gain over no adaptation by quarter of the stream instead, and after how many images
    to stop adapting, in hindsight."""
    json: bool = False
    """Print JSON."""


def results(options: Results) -> None:
    """Print the tables, and to stderr what could not be read."""
    if options.along and options.by_domain:
        raise ValueError("--along and --by-domain are two tables; ask for one of them")
    runs, problems = load_runs(options.runs)
    for problem in problems:
        print(f"not shown: {problem}", file=sys.stderr)
    if not runs:
        raise ValueError(f"no finished runs in {', '.join(map(str, options.runs))}")
    chosen = runs
    for text in options.filter:
        chosen = filter_runs(chosen, text)
    found = records(chosen, options.against, among=runs, along=options.along)
    rows = sort_records(found, options.sort)
    if options.json:
        if not options.by_domain:
            rows = [{k: v for k, v in row.items() if k != "by_domain"} for row in rows]
        print(json.dumps(rows, indent=2))
        return
    from moetta.commands.console import make_console

    if options.by_domain:
        shown = _domain_tables(rows)
    else:
        shown = _along_tables(rows) if options.along else _tables(rows, options.against)
    make_console().print(*shown)


def groups_tables(runs: Sequence[Run]) -> list[Table]:
    """The runs as `moetta results` shows them, best first."""
    return _tables(sort_records(records(runs), "accuracy"), "noadapt")


def _tables(rows: Sequence[Record], against: str) -> list[Table]:
    from rich.markup import escape
    from rich.table import Table

    tables = []
    for members in by_protocol(rows):
        table = Table(title=escape(record_title(members[0])), title_justify="left")
        table.add_column("method", overflow="fold")
        for name in ("accuracy %", f"vs {against}", "worst", "seeds", "collapses", "time x"):
            table.add_column(name, justify="right")
        for row in members:
            sd = "" if row["sd"] is None else f" ± {row['sd']:.2f}"
            table.add_row(
                escape(record_label(row)),
                f"{row['accuracy']:.2f}{sd}",
                "" if row["gain"] is None else f"{row['gain']:+.2f}",
                f"{row['worst']:.2f}",
                str(row["seeds"]),
                str(row["collapses"] or ""),
                "" if row["time"] is None else f"{row['time']:.2f}",
            )
        tables.append(table)
    return tables


def _along_tables(rows: Sequence[Record]) -> list[Table]:
    """Gain over the source model by quarter of the stream, in points."""
    from rich.markup import escape
    from rich.table import Table

    tables = []
    for members in by_protocol(rows):
        table = Table(title=escape(record_title(members[0])), title_justify="left")
        table.add_column("method", overflow="fold")
        for name in (
            "accuracy %",
            "gain",
            "quarter 1",
            "2",
            "3",
            "4",
            "best stop, images",
            "seeds",
        ):
            table.add_column(name, justify="right")
        for row in members:
            gains = [row["gain"], *(row["quarters"] or [None] * 4)]
            table.add_row(
                escape(record_label(row)),
                f"{row['accuracy']:.2f}",
                *("" if gain is None else f"{gain:+.2f}" for gain in gains),
                "" if row["best_stop"] is None else f"{row['best_stop']:,.0f}",
                str(row["seeds"]),
            )
        tables.append(table)
    return tables


def _domain_tables(rows: Sequence[Record]) -> list[Table]:
    """Accuracy in each domain, one column per group."""
    from rich.markup import escape
    from rich.table import Table

    tables = []
    for members in by_protocol(rows):
        table = Table("domain", title=escape(record_title(members[0])), title_justify="left")
        for row in members:
            table.add_column(escape(record_label(row)), justify="right", overflow="fold")
        for name in dict.fromkeys(name for row in members for name in row["by_domain"]):
            values = [row["by_domain"].get(name) for row in members]
            table.add_row(name, *("" if v is None else f"{v:.2f}" for v in values))
        tables.append(table)
    return tables
