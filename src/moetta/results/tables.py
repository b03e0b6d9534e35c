"""A table once, in the four forms people need: HTML, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from moetta.results.groups import Stat

BEST, SECOND = 1, 2
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """One field of a table.

    Attributes:
        value: The number or the text; None is shown as a dash.
        sd: The spread over seeds, shown as a subscript.
        rank: 1 is shown bold, 2 underlined.
        heat: Place on the colour scale of a heat map, 0 to 1.
        signed: Always show a sign.
    """

    value: float | str | None
    sd: float | None = None
    rank: int = 0
    heat: float | None = None
    signed: bool = False


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: The header.
        unit: Its unit, shown in the header.
        digits: Decimals of its numbers.
        best: Which end is best, "high" or "low", where the two best are marked.
        explain: What it is, shown on hover and below the table.
    """

    title: str
    unit: str = ""
    digits: int = 2
    best: str | None = None
    explain: str = ""

    @property
    def header(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Its file name without ending.
        caption: What it shows.
        columns: The first names the rows.
        rows: One cell a column.
        notes: Printed below it.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())


def cell(stat: Stat | None) -> Cell:
    """A figure over seeds: mean and spread."""
    return Cell(None) if stat is None else Cell(stat.mean, stat.sd)


def mean_only(stat: Stat | None) -> Cell:
    """A figure whose spread over seeds tells nothing."""
    return Cell(None) if stat is None else Cell(stat.mean)


def table(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    notes: Sequence[str] = (),
) -> Table:
    """A table in which the best two of each ranked column are marked and empty columns dropped."""
    keep = [
        place
        for place, _ in enumerate(columns)
        if place == 0 or any(row[place].value is not None for row in rows)
    ]
    chosen = [columns[place] for place in keep]
    body = [[row[place] for place in keep] for row in rows]
    for place, column in enumerate(chosen):
        if column.best is None or len(body) < 2:
            continue
        # Ranked as shown: what reads the same is equally good.
        shown = [
            round(v, column.digits) for row in body if isinstance(v := row[place].value, float)
        ]
        if len(set(shown)) < 2:
            continue
        order = sorted(set(shown), reverse=column.best == "high")[:2]
        for row in body:
            value = row[place].value
            if isinstance(value, float) and round(value, column.digits) in order:
                rank = order.index(round(value, column.digits)) + 1
                row[place] = replace(row[place], rank=rank)
    return Table(name, caption, tuple(chosen), tuple(map(tuple, body)), tuple(notes))


def _number(cell: Cell, column: Column) -> str:
    if isinstance(cell.value, str):
        return cell.value
    if cell.value is None:
        return NONE
    sign = "+" if cell.signed else ""
    text = f"{cell.value:{sign},.{column.digits}f}"
    if float(text.replace(",", "")) == 0:
        return text.lstrip("+-")
    return text.replace("-", "\N{MINUS SIGN}")


def _spread(cell: Cell, column: Column) -> str | None:
    return None if cell.sd is None else f"{cell.sd:,.{column.digits}f}"


def to_csv(table: Table) -> str:
    """Full precision; a spread has a column of its own."""
    spread = [any(row[i].sd is not None for row in table.rows) for i in range(len(table.columns))]
    header: list[str] = []
    for column, has_sd in zip(table.columns, spread, strict=True):
        header += [column.header, f"{column.header} (sd)"] if has_sd else [column.header]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        fields: list[float | str | None] = []
        for item, has_sd in zip(row, spread, strict=True):
            fields += [item.value, item.sd] if has_sd else [item.value]
        writer.writerow(["" if f is None else f for f in fields])
    return out.getvalue()


def to_markdown(table: Table) -> str:
    """A pipe table: bold best, underlined second, the spread after ±."""

    def show(item: Cell, column: Column) -> str:
        text = _number(item, column).replace("|", "\\|").replace("\n", " ")
        text = {BEST: f"**{text}**", SECOND: f"<u>{text}</u>"}.get(item.rank, text)
        sd = _spread(item, column)
        return f"{text} ± {sd}" if sd else text

    lines = [
        f"**{table.caption}**",
        "",
        "| " + " | ".join(c.header.replace("|", "\\|") for c in table.columns) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|",
    ]
    for row in table.rows:
        fields = [show(item, column) for item, column in zip(row, table.columns, strict=True)]
        lines.append("| " + " | ".join(fields) + " |")
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$",
    "±": r"$\pm$",
    NONE: "--",
    "·": r"$\cdot$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def to_latex(table: Table) -> str:
    """A table for the booktabs package."""

    def show(item: Cell, column: Column) -> str:
        text = _latex(_number(item, column))
        text = {BEST: f"\\textbf{{{text}}}", SECOND: f"\\underline{{{text}}}"}.get(item.rank, text)
        sd = _spread(item, column)
        return f"{text}$_{{\\pm {sd}}}$" if sd else text

    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_latex(table.caption)}}}",
        "\\begin{tabular}{l" + "r" * (len(table.columns) - 1) + "}",
        "\\toprule",
        " & ".join(_latex(column.header) for column in table.columns) + " \\\\",
        "\\midrule",
    ]
    for row in table.rows:
        fields = [show(item, column) for item, column in zip(row, table.columns, strict=True)]
        lines.append(" & ".join(fields) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    lines += [f"% {note}" for note in table.notes]
    return "\n".join(lines) + "\n"


def to_html(table: Table, files: str = "") -> str:
    """A sortable table in a box that scrolls on its own, so that the page never does."""
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
        fields = [_html_cell(item, column) for item, column in zip(row, table.columns, strict=True)]
        name = escape(str(row[0].value))
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


def _html_cell(item: Cell, column: Column) -> str:
    text = escape(_number(item, column))
    text = {BEST: f"<strong>{text}</strong>", SECOND: f"<u>{text}</u>"}.get(item.rank, text)
    sd = _spread(item, column)
    if sd:
        text += f'<sub title="standard deviation over seeds">{sd}</sub>'
    sort = "" if item.value is None else escape(str(item.value), quote=True)
    style = "" if item.heat is None else f' style="--heat:{item.heat:.3f}"'
    return f'<td data-sort="{sort}"{style}>{text}</td>'
