"""A table as HTML."""

from __future__ import annotations

import re
from html import escape

from moetta.results.tables import BEST, SECOND, Column, Entry, Table, shown, shown_sd


def to_html(table: Table, files: str = "") -> str:
    """A sortable table in a box that scrolls, so that the page never scrolls sideways."""
    identifier = escape(re.sub(r"[^a-z0-9-]", "-", table.name), quote=True)
    head = []
    for place, column in enumerate(table.columns):
        kind = "text" if place == 0 else "number"
        title = f' title="{escape(column.explain, quote=True)}"' if column.explain else ""
        head.append(
            f'<th scope="col" data-kind="{kind}"{title}>'
            f'<button type="button">{escape(column.title)}'
            + (f' <span class="unit">{escape(column.unit)}</span>' if column.unit else "")
            + "</button></th>"
        )
    body = []
    for row in table.rows:
        fields = [
            _html_entry(item, column) for item, column in zip(row, table.columns, strict=True)
        ]
        # Long names may break between their parts, never within a word.
        name = re.sub(r"([,_/])", r"\1<wbr>", escape(str(row[0].value)))
        body.append(f'<tr><th scope="row">{name}</th>{"".join(fields[1:])}</tr>')
    heat = any(item.heat is not None for row in table.rows for item in row)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    links = ""
    if files:
        forms = (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
        links = (
            '<p class="files">'
            + " ".join(
                f'<a href="{escape(files, quote=True)}/{identifier}.{end}">{form}</a>'
                for end, form in forms
            )
            + "</p>"
        )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{identifier}-caption">'
        f'<table id="{identifier}"{" class=heat" if heat else ""}>'
        f'<caption id="{identifier}-caption">{escape(table.caption)}</caption>'
        f"<thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        f"{notes}{links}"
    )


def _html_entry(item: Entry, column: Column) -> str:
    text = escape(shown(item, column))
    text = {BEST: f"<strong>{text}</strong>", SECOND: f"<u>{text}</u>"}.get(item.rank, text)
    sd = shown_sd(item, column)
    if sd:
        text += f'<sub title="standard deviation over seeds">{sd}</sub>'
    sort = "" if item.value is None else escape(str(item.value), quote=True)
    style = "" if item.heat is None else f' style="--heat:{item.heat:.3f}"'
    return f'<td data-sort="{sort}"{style}>{text}</td>'
