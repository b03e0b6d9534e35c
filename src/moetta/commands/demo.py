"""`moetta demo`: what the project is for, in a few minutes and with nothing to download."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moetta.bench.cell import grid
from moetta.bench.grid import finished, require_all
from moetta.commands.console import make_console
from moetta.commands.options import Running, write_report
from moetta.commands.results import groups_tables
from moetta.methods import list_methods
from moetta.results.runs import load_run


@dataclass(frozen=True)
class Demo(Running):
    """All methods on one mixed stream of images that need no download; a table and a page."""

    out: Path = Path("runs/demo")
    """Folder of the results; what is finished there is not run again."""
    model: str = "digits-vit"
    """A shipped model, or module:function."""
    stream: str = "potpourri+"
    """classical, potpourri or potpourri+ of the embedded benchmark."""
    methods: tuple[str, ...] = ()
    """Methods to compare; all by default."""
    seed: int = 42
    """Seed of the stream's order."""
    limit: int | None = None
    """Use only this many images."""
    report: Path | None = None
    """The page; report.html in the results folder by default."""


def demo(options: Demo) -> None:
    """Run each method over the same stream, print the table, write the page."""
    begun = time.monotonic()
    cells = grid(
        method=list(options.methods or list_methods()),
        stream=options.stream,
        model=options.model,
        seed=options.seed,
        limit=options.limit,
        loaders=options.loaders,
        threads=options.threads,
        device=options.device,
    )
    console = make_console(stderr=options.json)
    console.print(
        f"A small model has learnt clean pictures of two-digit numbers. Now it meets the "
        f"{options.stream} stream: noise, blur, weather, other styles and clean pictures, all "
        "mixed.\nEach method adapts the model while it predicts; noadapt leaves it as it is.",
        highlight=False,
    )
    outcomes = options.run(cells)
    folders, page = finished(outcomes), None
    if folders and not options.json:
        console.print(*groups_tables([load_run(folder) for folder in folders]))
    if folders:
        page = write_report(folders, options.report or options.out / "report.html")
    took = f"{time.monotonic() - begun:.0f} s"
    where = sys.stderr if options.json else sys.stdout
    print(f"done in {took}" + (f"; open {page} for the pictures" if page else ""), file=where)
    require_all(cells, outcomes)  # what failed is told below what did not
