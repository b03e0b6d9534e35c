"""`moetta run`: methods on any streams and models."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from moetta.bench.cell import BASELINE, Cell, CellOptions
from moetta.bench.grid import finished_folders, make_grid, require_all
from moetta.commands.console import make_console
from moetta.commands.options import Running, cell_fields, expand_methods, only_grouped, write_report
from moetta.commands.results import groups_tables
from moetta.core.config import parse_overrides
from moetta.data.catalogue import stream_names
from moetta.results.runs import load_run

_STREAM_HELP = (
    f"Streams: {', '.join(stream_names(embedded=False))}; a TOML mixture; or a folder with one "
    "folder per class."
)


@dataclass(frozen=True)
class Axes:
    """Options that take several values; all combinations are run."""

    method: tuple[str, ...] = ("moetta",)
    """Methods: names (`moetta methods` lists them), your own module:Class, or a group: all,
    paper (the paper's nine), or one that `moetta methods` shows."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(help=_STREAM_HELP)] = ("potpourri+",)
    model: tuple[str, ...] = ("digits-vit",)
    """Models: a shipped model, a timm name with its tag, module:function, or a Hugging Face
    folder."""
    seeds: tuple[int, ...] = (42,)
    """Seeds of the stream's order and of the methods' random draws."""
    set: tuple[str, ...] = ()
    """Fields of the methods' configuration, such as lr=1e-3 experts=11."""


@dataclass(frozen=True)
class RunOptions(Running, CellOptions, Axes):
    """Run methods over streams of images; each result has a card that says what was run.

    Method, stream, model and seeds each take several values: all combinations are run.
    """

    report: Path | None = None
    """Also write an HTML page of these runs."""


def run(options: RunOptions) -> None:
    """Run the cells, print a table."""
    wanted = cells(options)
    outcomes = options.run(wanted)
    runs = [load_run(folder) for folder in finished_folders(outcomes)]
    if runs and not options.json:
        make_console().print(*groups_tables(runs))
        print(f"results in {options.out}; moetta report {options.out} makes a page of them")
    if runs and options.report is not None:
        page = write_report(finished_folders(outcomes), options.report)
        print(f"report: {page}", file=sys.stderr if options.json else sys.stdout)
    # Last, so that failures appear below the results.
    require_all(wanted, outcomes, only_grouped(options.method))


def cells(options: RunOptions) -> list[Cell]:
    """The grid that the options describe."""
    made = make_grid(
        model=list(options.model),
        stream=list(options.stream),
        method=expand_methods(options.method),
        seed=list(options.seeds),
        **cell_fields(options),
    )
    overrides, variant = parse_overrides(options.set), ",".join(options.set) or None
    return [  # noadapt has nothing to set, but is still useful for comparison
        cell if cell.method == BASELINE else replace(cell, overrides=overrides, variant=variant)
        for cell in made
    ]
