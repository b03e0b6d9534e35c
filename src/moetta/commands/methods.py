"""The command ``moetta methods``: the methods and their settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moetta.methods import GROUPS, Method, find, list_methods


@dataclass(frozen=True)
class Methods:
    """List the methods, or explain one."""

    name: tyro.conf.Positional[str | None] = None
    """A method, to see its settings, presets and citation; or package.module:Class."""
    json: bool = False
    """Print JSON."""


def methods(options: Methods) -> None:
    """Print the methods, or one method's settings."""
    chosen = [find(options.name)] if options.name else list(list_methods().values())
    if options.json:
        listing = {m.name: {**m.to_dict(), "config": m.config().to_dict()} for m in chosen}
        print(json.dumps(listing, indent=2))
    elif options.name:
        _explain(chosen[0], Console())
    else:
        _list(chosen, Console())


def _list(chosen: list[Method], console: Console) -> None:
    table = Table("method", "what it does", "needs", "passes per batch", "paper")
    for group in GROUPS:
        members = [method for method in chosen if method.group == group]
        if not members:
            continue
        table.add_section()
        table.add_row(f"[bold]{group}[/bold]")
        for m in members:
            paper = "" if m.citation is None else str(m.citation)
            table.add_row(f"  {m.name}", m.summary, _needs(m), m.cost, paper)
    console.print(table)
    console.print("`moetta methods NAME` shows a method's settings, presets and citation.")


def _explain(method: Method, console: Console) -> None:
    console.print(f"[bold]{method.title}[/bold] ({method.name}, {method.group}): {method.summary}")
    console.print(f"needs {_needs(method) or 'norm layers'}; {method.cost or 'cost not stated'}\n")
    columns = {name: method.config.preset(name) for name in ("paper", *method.config.presets)}
    table = Table("field", *columns, "meaning")
    meanings = method.config.field_docs()
    for field in fields(method.config):
        values = (str(getattr(config, field.name)) for config in columns.values())
        table.add_row(field.name, *values, escape(meanings[field.name]))
    console.print(table)
    if method.citation is not None:
        console.print()
        console.print(method.citation.bibtex(method.name), markup=False, highlight=False)


def _needs(method: Method) -> str:
    source = "source images" if method.needs_source else ""
    return ", ".join(filter(None, (source, method.needs)))
