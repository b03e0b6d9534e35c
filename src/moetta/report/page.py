"""The page: tables, figures and text in one HTML file that needs no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from moetta.figures import look
from moetta.report import contents
from moetta.report.frames import Frames
from moetta.report.headline import headline
from moetta.report.html import to_html
from moetta.report.pictures import Picture, inline_svg, picture_files
from moetta.report.plots import by_domain, over_stream, pareto
from moetta.report.routing import expert_pictures
from moetta.results import Comparison, Group, Problem, Published, Table, slug

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="generator" content="moetta">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<header>
<div class="top"><h1>$title</h1><button type="button" id="theme" hidden>Dark</button></div>
<p class="about">$about</p>
$warnings
<section class="headline" aria-label="Result">$headline</section>
$navigation
</header>
<main>
$body
</main>
<footer><p>$footer</p></footer>
<script>
$script</script>
</body>
</html>
""")  # noqa: E501


@dataclass(frozen=True)
class Section:
    """One comparison's part of the page."""

    comparison: Comparison
    tables: list[Table]
    pictures: list[Picture]
    expert_pictures: list[Picture]


@dataclass(frozen=True)
class Report:
    """Everything a report holds, before it is written.

    Attributes:
        html: The page.
        tables: All its tables.
        figures: The files of its figures, by name.
    """

    html: str
    tables: list[Table]
    figures: dict[str, bytes]


def build(
    comparisons: Sequence[Comparison],
    problems: Sequence[Problem],
    files: str,
    title: str | None,
    published: Mapping[tuple[str, str], Published],
    figures: Sequence[str],
) -> Report:
    """Make the page.

    Args:
        comparisons: What to show.
        problems: What could not be read.
        files: The folder next to the page, as links name it.
        title: The page's title.
        published: Published results to compare with ours, by model and stream.
        figures: File formats of the figures.
    """
    printed = [published.get((c.model, c.stream), contents.NOTHING) for c in comparisons]
    by_model: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        by_model.setdefault(comparison.model, []).append(comparison)
    overviews = [
        contents.overview(model, members, published)
        for model, members in by_model.items()
        if len(members) > 1
    ]
    frames = Frames()
    with look():
        sections = [_section(c, p, frames) for c, p in zip(comparisons, printed, strict=True)]
    problems = [*problems, *frames.problems]
    body = []
    if overviews:
        tables = "".join(to_html(table, files) for table in overviews)
        body.append(f'<section><h2 id="overview">All streams</h2>{tables}</section>')
    body += [_section_html(section, files, figures) for section in sections]
    body.append(_cards(comparisons, printed))
    if problems:
        body.append(_problems(problems))
    told = [headline(c, p.proposed) for c, p in zip(comparisons, printed, strict=True)]
    forms = ", ".join(form.upper() for form in figures)
    html = PAGE.substitute(
        title=escape(title or _title(comparisons)),
        style=_asset("style.css"),
        script=_asset("script.js"),
        about=escape(_about(comparisons)),
        warnings=_warnings(comparisons, problems),
        headline="".join(f"<p>{escape(text)}</p>" for text in told),
        navigation=_navigation(comparisons, bool(overviews), bool(problems)),
        body="\n".join(body),
        footer=(
            "Accuracy is scored on each batch before the update it causes. Subscripts are unbiased "
            "standard deviations over seeds; the best of a column is bold, the second underlined. "
            f"Figures ({escape(forms)}) and tables (CSV, Markdown, LaTeX) are in "
            f"<code>{escape(files)}/</code>."
        ),
    )
    tables_made = overviews + [table for section in sections for table in section.tables]
    drawn: dict[str, bytes] = {}
    for section in sections:
        for picture in (*section.pictures, *section.expert_pictures):
            drawn |= picture_files(picture, figures)
    return Report(html, tables_made, drawn)


def _asset(name: str) -> str:
    return (resources.files("moetta.report") / name).read_text(encoding="utf-8")


def _section(comparison: Comparison, published: Published, frames: Frames) -> Section:
    tables = [
        contents.accuracies(comparison, published),
        contents.beyond(comparison, published),
        contents.costs(comparison, published),
        contents.domains(comparison, published),
    ]
    drawn = [
        over_stream(comparison, frames),
        pareto(comparison),
        by_domain(comparison, frames, published.order),
    ]
    return Section(
        comparison,
        [table for table in tables if table.rows and len(table.columns) > 1],
        [item for item in drawn if item is not None],
        expert_pictures(comparison, frames),
    )


def _section_html(section: Section, files: str, forms: Sequence[str]) -> str:
    comparison = section.comparison
    main, *more = section.tables
    parts = [
        f'<section><h2 id="{slug(comparison.model, comparison.stream)}">',
        f"{escape(comparison.name)}</h2>",
        to_html(main, files),
        _figures(section.pictures, files, forms),
    ]
    if section.expert_pictures:
        parts.append("<h3>The experts</h3>")
        parts.append(_figures(section.expert_pictures, files, forms))
    parts += [to_html(table, files) for table in more]
    return "".join(parts) + "</section>"


def _figures(pictures: Sequence[Picture], files: str, forms: Sequence[str]) -> str:
    if not pictures:
        return ""
    made = "".join(_figure(picture, files, forms) for picture in pictures)
    return f'<div class="figures">{made}</div>'


def _figure(picture: Picture, files: str, forms: Sequence[str]) -> str:
    links = " ".join(
        f'<a href="{escape(files, quote=True)}/{picture.name}.{form}">{form.upper()}</a>'
        for form in forms
    )
    other = ""
    if picture.other is not None:
        inner = _figure(picture.other, files, forms)
        other = f"<details><summary>{escape(picture.other.title)}</summary>{inner}</details>"
    return (
        f'<figure id="{picture.name}"><h3>{escape(picture.title)}</h3>'
        f"{inline_svg(picture)}"
        f"<figcaption>{escape(picture.caption)}</figcaption>"
        f'<p class="files">{links}</p>{other}</figure>'
    )


def _title(comparisons: Sequence[Comparison]) -> str:
    streams = list(dict.fromkeys(comparison.stream for comparison in comparisons))
    if len(streams) > 3:
        return f"Test-time adaptation on {len(streams)} streams"
    return f"Test-time adaptation on {', '.join(streams)}"


def _about(comparisons: Sequence[Comparison]) -> str:
    groups = [group for comparison in comparisons for group in comparison.groups]
    runs = [run for group in groups for run in group.runs]
    methods = {group.method for group in groups}
    seeds = {run.seed for run in runs}
    days = sorted({str(run.card.get("created") or "")[:10] for run in runs} - {""})
    when = f", made {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    models = list(dict.fromkeys(comparison.model for comparison in comparisons))
    named = " and ".join(models) if len(models) <= 2 else f"{len(models)} models"
    return (
        f"{_count(len(runs), 'run')}: {_count(len(methods), 'method')}, "
        f"{_count(len({comparison.stream for comparison in comparisons}), 'stream')}, "
        f"{_count(len(seeds), 'seed')}, {named}{when}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _warnings(comparisons: Sequence[Comparison], problems: Sequence[Problem]) -> str:
    lines = []
    for comparison in comparisons:
        for number, text in enumerate(comparison.deviations, start=2):
            lines.append(
                f"Mixed protocols on {comparison.name}: methods marked [protocol {number}] are not "
                f"comparable with the rest; they differ in {text}."
            )
    lost = sum(problem.lost for problem in problems)
    if problems:
        damaged = len(problems) - lost
        told = [f"{_count(lost, 'folder')} left out"] if lost else []
        told += [f"{_count(damaged, 'file')} unreadable"] if damaged else []
        lines.append(f"Some results are not shown: {', '.join(told)} (listed at the end).")
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="warning" aria-label="Warnings"><ul>{items}</ul></section>'


def _navigation(comparisons: Sequence[Comparison], overview: bool, problems: bool) -> str:
    links = [("overview", "All streams")] if overview else []
    links += [(slug(s.model, s.stream), s.name) for s in comparisons]
    links += [("cards", "Protocol")] + ([("problems", "Not shown")] if problems else [])
    if len(links) < 3:
        return ""
    items = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _cards(comparisons: Sequence[Comparison], printed: Sequence[Published]) -> str:
    parts = [
        '<section><h2 id="cards">Protocol cards</h2>'
        "<p>What was run: the model and its weights, the stream, the configuration, the versions. "
        "One card per method; its seeds share it.</p>"
    ]
    for comparison, published in zip(comparisons, printed, strict=True):
        cards = "".join(_card(group) for group in comparison.in_order(published.order))
        parts.append(f"<details><summary>{escape(comparison.name)}</summary>{cards}</details>")
    return "".join(parts) + "</section>"


def _card(group: Group) -> str:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    folders = ", ".join(run.folder.name for run in group.runs[:3])
    more = f" and {len(group.runs) - 3} more" if len(group.runs) > 3 else ""
    shown = {name: value for name, value in group.runs[0].card.items() if name != "cell"}
    text = json.dumps(shown, indent=1, ensure_ascii=False)  # "cell" holds private paths
    return (
        f"<details><summary>{escape(group.label)}: seeds {seeds}</summary>"
        f"<p>From <code>{escape(folders)}</code>{more}.</p><pre>{escape(text)}</pre></details>"
    )


def _problems(problems: Sequence[Problem]) -> str:
    items = "".join(
        f"<li><code>{escape(_where(problem))}</code>: {escape(problem.reason)}</li>"
        for problem in problems
    )
    return f'<section class="warning"><h2 id="problems">Not shown</h2><ul>{items}</ul></section>'


def _where(problem: Problem) -> str:
    """The folder, or folder and file if only the file is damaged; the full path is private."""
    return problem.path.name if problem.lost else "/".join(problem.path.parts[-2:])
