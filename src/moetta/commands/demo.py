"""`moetta demo`: what the project does, in a few minutes and without a download."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moetta.bench.grid import finished_folders, make_grid, require_all
from moetta.commands.console import make_console
from moetta.commands.options import Running, cell_fields, expand_methods, write_report
from moetta.commands.results import groups_tables
from moetta.results.runs import load_run


@dataclass(frozen=True)
class Demo(Running):
    """Compare the paper's methods on one mixed stream, without a download: a table and a page."""

    out: Path = Path("runs/demo")
    """Folder of the results; finished runs in it are not run again."""
    model: str = "digits-vit"
    """A shipped model, or module:function."""
    stream: str = "potpourri+"
    """A stream of the embedded benchmark: classical, potpourri or potpourri+."""
    methods: tuple[str, ...] = ("paper",)
    """Methods or groups of methods to compare."""
    seed: int = 42
    """Seed of the stream's order."""
    limit: int | None = None
    """Use only this many images."""
    report: Path | None = None
    """The page; by default report.html in the results folder."""


def demo(options: Demo) -> None:
    """Run each method over the same stream, print the table, write the page."""
    begun = time.monotonic()
    cells = make_grid(
        method=expand_methods(options.methods),
        stream=options.stream,
        model=options.model,
        seed=options.seed,
        **cell_fields(options),
    )
    console = make_console(stderr=options.json)
    console.print(
        "A small model has been trained on clean images of two-digit numbers. Now it sees the "
        f"{options.stream} stream: noise, blur, weather, other styles and clean images, all "
        "mixed.\nEach method adapts the model while it predicts; noadapt leaves it unchanged.",
        highlight=False,
    )
    outcomes = options.run(cells)
    folders, page = finished_folders(outcomes), None
    if folders and not options.json:
        console.print(*groups_tables([load_run(folder) for folder in folders]))
    if folders:
        page = write_report(folders, options.report or options.out / "report.html")
    took = f"{time.monotonic() - begun:.0f} s"
    where = sys.stderr if options.json else sys.stdout
    print(f"done in {took}" + (f"; open {page} to see the figures" if page else ""), file=where)
    require_all(cells, outcomes)  # last, so that failures appear below the results
