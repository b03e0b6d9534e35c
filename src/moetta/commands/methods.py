"""What there is: the methods and their settings, for the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import tyro
from rich.console import Console
from rich.table import Table

from moetta.methods import find
from moetta.methods import methods as all_methods


@dataclass(frozen=True)
class Methods:
    """List the methods, or explain one."""

    name: tyro.conf.Positional[str | None] = None
    """A method, to see its settings and presets."""
    json: bool = False
    """Print JSON for machines."""


def methods(options: Methods) -> None:
    """Print the methods, or one method's settings."""
    chosen = [find(options.name)] if options.name else list(all_methods().values())
    if options.json:
        listing = {m.name: {"summary": m.summary, "config": m.config().to_dict()} for m in chosen}
        print(json.dumps(listing, indent=2))
        return
    console = Console()
    if options.name is None:
        table = Table("method", "what it does", "needs source images")
        for method in chosen:
            table.add_row(method.name, method.summary, "yes" if method.adapter.needs_source else "")
        console.print(table)
        return
    (method,) = chosen
    console.print(f"[bold]{method.name}[/bold]: {method.summary}\n")
    table = Table("field", "paper", *method.config.presets)
    columns = [method.config.preset(name) for name in ("paper", *method.config.presets)]
    for field in fields(method.config):
        table.add_row(field.name, *(str(getattr(column, field.name)) for column in columns))
    console.print(table)
    console.print((method.config.__doc__ or "").split("Attributes:")[-1].rstrip())
