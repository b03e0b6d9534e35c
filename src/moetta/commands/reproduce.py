"""`moetta reproduce`: a table or figure of the paper, with the paper's numbers next to ours."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from moetta.bench.backends import Backend
from moetta.bench.cell import BASELINE, Cell, DataOptions
from moetta.bench.grid import finished_folders, require_all
from moetta.bench.progress import Outcome
from moetta.commands.console import make_console
from moetta.commands.options import Running, cell_fields, expand_methods, only_grouped, write_report
from moetta.paper.experiments import EXPERIMENTS, OURS, Workload
from moetta.paper.experiments.workload import EMBEDDED_MODELS, Found
from moetta.paper.published import PAPER_MODELS
from moetta.results.runs import load_run
from moetta.results.tables import Column, Entry, Table, write_tables
from moetta.suggest import nearest

RACES = ("grid-search", "sensitivity")
"""Experiments that look for the best setting, so that poor ones may be stopped early."""


@dataclass(frozen=True)
class Reproduce(Running, DataOptions):
    """Reproduce a result of the paper on ImageNet (--data), or else on the embedded benchmark.

    Prints the paper's numbers next to ours. Tables (CSV, Markdown, LaTeX) and figures go to the
    results folder, under paper/NAME. If interrupted, the same command resumes.
    """

    name: tyro.conf.Positional[str] = "all"
    """table1, table2, table3, scalability, grid-search, gradient-cosine, tsne, expert-similarity,
    expert-heatmaps, partial-replacement, sensitivity, theory; all of these; or length, which is
    ours and takes hours."""
    models: tuple[str, ...] = ()
    """Models; by default the paper's with --data, or else the two embedded ones."""
    method: tuple[str, ...] = ()
    """Methods in table1, table2, scalability and length: names, or a group (paper, all,
    no-gradient, ...). noadapt is always there. By default the paper's nine; for length, those that
    lead."""
    seeds: tuple[int, ...] | None = None
    """Seeds; by default as many as the paper used: three for table1, one elsewhere."""
    early_stop: bool = False
    """With --ray, for grid-search and sensitivity: stop runs that fall behind others of the same
    method (ASHA, of Ray Tune). They have no result, and the tables say which they are."""
    report: Path | None = None
    """Also write an HTML page of the runs."""

    def backend(self) -> Backend:
        """What runs the cells.

        Raises:
            ValueError: options contradict each other.
        """
        made = super().backend()
        if not self.early_stop:
            return made
        if self.name not in RACES:
            raise ValueError(
                f"--early-stop is for {' and '.join(RACES)}, which look for the best setting; "
                f"{self.name} needs every run to its end"
            )
        if self.ray is None:
            raise ValueError("--early-stop needs --ray: a scheduler of Ray Tune does the stopping")
        from moetta.bench.ray_tune import EarlyStopping  # Ray is an extra

        return EarlyStopping(self.out, self.address, self.store, self.checkpoint_seconds)


def reproduce(options: Reproduce) -> None:
    """Run what an experiment needs, print and write its tables.

    Raises:
        ValueError: something failed; all that succeeded is shown and written first.
    """
    if options.name != "all" and options.name not in EXPERIMENTS:
        hint = nearest(options.name, [*EXPERIMENTS, "all"])
        raise ValueError(f"no experiment {options.name!r}; {hint}")
    paper = [name for name in EXPERIMENTS if name not in OURS]
    names = paper if options.name == "all" else [options.name]
    if options.method and not any(EXPERIMENTS[name].any_methods for name in names):
        raise ValueError(f"--method has no effect on {options.name}: leave it out")
    options.backend()  # refuses options that contradict each other, before the first experiment
    folders: list[Path] = []
    failures: list[tuple[str, Exception]] = []
    for name in names:
        folders += _one(name, options, failures)
    if options.report is not None and folders:
        with _noted("report", failures):
            page = write_report(list(dict.fromkeys(folders)), options.report)
            print(f"report: {page}", file=sys.stderr if options.json else sys.stdout)
    if failures:
        raise _together(failures) if len(names) > 1 else failures[0][1]


def make_workload(name: str, options: Reproduce) -> Workload:
    """What an experiment runs on."""
    models = options.models
    if not models and options.data is None:
        models = EMBEDDED_MODELS
    elif not models:
        vit, convnext, large = PAPER_MODELS
        models = (large,) if name == "scalability" else (vit, convnext)
    if options.weights is not None and len(models) > 1:
        raise ValueError("--weights needs exactly one model; name it with --models")
    common = cell_fields(options)
    data = common.pop("data")
    if data is not None and all(model in PAPER_MODELS for model in models):
        common["preprocess"] = "paper"
    methods = None
    if options.method:
        methods = tuple(dict.fromkeys((BASELINE, *expand_methods(options.method))))
    return Workload(models, data, options.seeds, methods, common)


def _one(name: str, options: Reproduce, failures: list[tuple[str, Exception]]) -> list[Path]:
    """Run and show one experiment; returns the folders of the finished runs."""
    experiment = EXPERIMENTS[name]
    make_console(stderr=options.json).rule(f"{name}: {experiment.title}", align="left")
    outcomes: list[Outcome] = []
    with _noted(name, failures):
        workload = make_workload(name, options)
        cells = experiment.cells(workload)
        outcomes = options.run(cells) if cells else []
        found = {c: load_run(o.folder) for c, o in zip(cells, outcomes, strict=True) if o.folder}
        if found or not cells:
            with _noted(name, failures):  # a table with a gap must not hide which run failed
                _show(name, workload, found, options, _stopped_early(cells, outcomes))
        require_all(cells, outcomes, only_grouped(options.method))
    return finished_folders(outcomes)


@contextlib.contextmanager
def _noted(name: str, failures: list[tuple[str, Exception]]) -> Iterator[None]:
    """Keep an error for the end, so that one failing experiment does not stop the others."""
    try:
        yield
    except ConnectionError:  # the other experiments would not get further
        raise
    except Exception as error:
        failures.append((name, error))


def _together(failures: Sequence[tuple[str, Exception]]) -> ValueError:
    reasons: dict[str, list[str]] = {}  # a missing folder fails many experiments the same way
    for name, error in failures:
        if not isinstance(error, (ValueError, OSError)):  # not the user's fault
            traceback.print_exception(error)
        reasons.setdefault(str(error), []).append(name)
    return ValueError("\n".join(f"{', '.join(names)}: {error}" for error, names in reasons.items()))


def _stopped_early(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str | None:
    """A note on the runs that the tables lack."""
    stopped = [c.label for c, o in zip(cells, outcomes, strict=True) if o.stopped is not None]
    if not stopped:
        return None
    return (
        f"{len(stopped)} of {len(cells)} runs were stopped early (--early-stop) and have no value: "
        f"{', '.join(stopped)}."
    )


def _show(
    name: str, workload: Workload, found: Found, options: Reproduce, note: str | None = None
) -> None:
    place = options.out / "paper" / name
    try:
        tables = EXPERIMENTS[name].present(workload, found, place)
    except KeyboardInterrupt:  # experiments without a grid compute here
        raise KeyboardInterrupt(
            f"stopped in {name}; the same command resumes, without repeating finished runs"
        ) from None
    if note is not None:
        tables = [replace(made, notes=(*made.notes, note)) for made in tables]
    write_tables(tables, place)
    console = make_console(stderr=options.json)
    for made in tables:
        if options.json:
            print(json.dumps({"event": "table", "experiment": name, **as_record(made)}))
        else:
            print_table(console, made)
    console.print(escape(f"tables and figures: {place}"), highlight=False)


def as_record(made: Table) -> dict[str, Any]:
    """A table as plain data."""
    columns = [column.header for column in made.columns]
    rows = [[cell.value for cell in row] for row in made.rows]
    return {"name": made.name, "caption": made.caption, "columns": columns, "rows": rows,
            "notes": list(made.notes)}  # fmt: skip


def print_table(console: Console, made: Table) -> None:
    """Print a table: the best value in bold, the standard deviation after ±."""
    shown = RichTable(title=escape(made.caption), title_justify="left")
    for place, column in enumerate(made.columns):
        shown.add_column(
            escape(column.header), justify="right" if place else "left", overflow="fold"
        )
    for row in made.rows:
        shown.add_row(*map(_field, row, made.columns))
    console.print(shown)
    for note in made.notes:
        console.print(escape(note), highlight=False, style="italic")


def _field(entry: Entry, column: Column) -> str:
    if entry.value is None:
        return ""
    if isinstance(entry.value, str):
        return escape(entry.value)
    text = f"{entry.value:{'+' if entry.signed else ''}.{column.digits}f}"
    if entry.sd is not None:
        text += f" ± {entry.sd:.{column.digits}f}"
    return f"[bold]{text}[/bold]" if entry.rank == 1 else text
