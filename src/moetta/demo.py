"""The demonstration: one mixed stream, the source model and what adaptation makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

import moetta
from moetta import sources
from moetta.data import embedded


@dataclass(frozen=True)
class Demo:
    """Adapt the embedded model to the embedded potpourri+ stream and print what it gains."""

    model: str = "digits-vit"
    """A shipped source model."""
    stream: str = "potpourri+"
    """classical, potpourri or potpourri+."""
    methods: tuple[str, ...] = ("noadapt", "tent", "moetta")
    """Methods to compare."""
    seed: int = 42
    """Seed of the stream's order."""
    limit: int | None = None
    """Use only this many images."""


def demo(options: Demo) -> None:
    """Run each method over the same stream and print the accuracies."""
    console = Console()
    stream = embedded.stream(options.stream, seed=options.seed, limit=options.limit)
    table = Table("method", "accuracy %", "gain", title=f"{options.model}, {options.stream}")
    baseline: float | None = None
    for name in options.methods:
        model = sources.load(options.model)
        source = (
            embedded.source_images(512) if moetta.methods()[name].adapter.needs_source else None
        )
        settings = sources.tuned(options.model, name)
        adapter = moetta.adapt(model, name, source=source, **settings)
        right = seen = 0
        for batch in track(stream, description=f"{name:>8}", console=console, transient=True):
            right += int((adapter(batch.images).argmax(1) == batch.labels).sum())
            seen += len(batch.labels)
        accuracy = 100 * right / seen
        baseline = accuracy if baseline is None else baseline
        table.add_row(name, f"{accuracy:.2f}", f"{accuracy - baseline:+.2f}")
    console.print(table)
