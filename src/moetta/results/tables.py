"""Tables, and their CSV, Markdown and LaTeX forms."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moetta.files import write_atomically
from moetta.results.groups import Group, Stat
from moetta.results.published import Printed

BEST, SECOND = 1, 2
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Entry:
    """One entry of a table.

    Attributes:
        value: The number or the text; None is shown as a dash.
        sd: The standard deviation over seeds, shown as a subscript.
        rank: 1 is shown bold, 2 underlined.
        heat: Position on a colour scale from 0 to 1, for tables coloured as heat maps.
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
        best: "high" or "low" to mark the two best entries.
        explain: What it means, shown on hover.
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
        name: Its file name without extension.
        caption: What it shows.
        columns: The first one names the rows.
        rows: One entry per column.
        notes: Printed below it.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = field(default=())


def entry(stat: Stat | None) -> Entry:
    """A number over seeds, as mean and standard deviation."""
    return Entry(None) if stat is None else Entry(stat.mean, stat.sd)


def mean_only(stat: Stat | None) -> Entry:
    """A number over seeds, as its mean only, where the spread means nothing."""
    return Entry(None) if stat is None else Entry(stat.mean)


def beside(ours: Group | None, printed: Printed | None) -> list[Entry]:
    """Three entries: our accuracy, the published one and the difference."""
    mine = None if ours is None else ours.accuracy
    gap = None if mine is None or printed is None else mine.mean - printed.mean
    theirs = Entry(None) if printed is None else Entry(printed.mean, printed.sd)
    return [entry(mine), theirs, Entry(gap, signed=True)]


def beside_columns(title: str) -> list[Column]:
    """The columns of what `beside` returns."""
    return [
        Column(title, "ours %", best="high"),
        Column(title, "paper %"),
        Column(title, "ours - paper"),
    ]


def table(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Entry]],
    notes: Sequence[str] = (),
) -> Table:
    """A table with the best two of each ranked column marked and empty columns dropped."""
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
        # Ranked as shown: entries that read the same share a rank.
        values = [
            round(v, column.digits) for row in body if isinstance(v := row[place].value, float)
        ]
        if len(set(values)) < 2:
            continue
        order = sorted(set(values), reverse=column.best == "high")[:2]
        for row in body:
            value = row[place].value
            if isinstance(value, float) and round(value, column.digits) in order:
                rank = order.index(round(value, column.digits)) + 1
                row[place] = replace(row[place], rank=rank)
    return Table(name, caption, tuple(chosen), tuple(map(tuple, body)), tuple(notes))


def shown(item: Entry, column: Column) -> str:
    """An entry's value as text."""
    if isinstance(item.value, str):
        return item.value
    if item.value is None:
        return NONE
    sign = "+" if item.signed else ""
    text = f"{item.value:{sign},.{column.digits}f}"
    if float(text.replace(",", "")) == 0:
        return text.lstrip("+-")
    return text.replace("-", "\N{MINUS SIGN}")


def shown_sd(item: Entry, column: Column) -> str | None:
    """An entry's standard deviation as text."""
    return None if item.sd is None else f"{item.sd:,.{column.digits}f}"


def to_csv(table: Table) -> str:
    """CSV at full precision, standard deviations in separate columns."""
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
    """A pipe table: best in bold, second underlined, standard deviation after ±."""

    def show(item: Entry, column: Column) -> str:
        text = shown(item, column).replace("|", "\\|").replace("\n", " ")
        text = {BEST: f"**{text}**", SECOND: f"<u>{text}</u>"}.get(item.rank, text)
        sd = shown_sd(item, column)
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

    def show(item: Entry, column: Column) -> str:
        text = _latex(shown(item, column))
        text = {BEST: f"\\textbf{{{text}}}", SECOND: f"\\underline{{{text}}}"}.get(item.rank, text)
        sd = shown_sd(item, column)
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


FORMS: dict[str, Callable[[Table], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
"""The forms of a table, by file extension."""


def write_tables(tables: Iterable[Table], folder: Path) -> None:
    """Write each table in all its forms."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in tables:
        for extension, form in FORMS.items():
            write_atomically(folder / f"{made.name}.{extension}", form(made).encode())
