"""The page: tables, pictures and words in one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from moetta.report import contents
from moetta.report.figures import STYLES, Picture, inline_svg, look
from moetta.report.headline import headline
from moetta.report.plots import by_domain, over_stream, pareto
from moetta.report.routing import expert_pictures
from moetta.results.groups import Group, Setting, slug
from moetta.results.read import Failure
from moetta.results.tables import Table, to_html

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
    """One setting's part of the page."""

    setting: Setting
    tables: list[Table]
    pictures: list[Picture]
    expert_pictures: list[Picture]


@dataclass(frozen=True)
class Report:
    """Everything a report holds, before it is written.

    Attributes:
        html: The page.
        tables: All its tables.
        pictures: All its pictures.
    """

    html: str
    tables: list[Table]
    pictures: list[Picture]


def build(
    settings: Sequence[Setting], failures: Sequence[Failure], files: str, title: str | None = None
) -> Report:
    """Make the page.

    Args:
        settings: What is compared.
        failures: What could not be read.
        files: The folder beside the page, as links name it.
        title: The page's title.
    """
    by_model: dict[str, list[Setting]] = {}
    for setting in settings:
        by_model.setdefault(setting.model, []).append(setting)
    overviews = [
        contents.overview(model, members) for model, members in by_model.items() if len(members) > 1
    ]
    with look():
        sections = [_section(setting) for setting in settings]
    body = []
    if overviews:
        tables = "".join(to_html(table, files) for table in overviews)
        body.append(f'<section><h2 id="overview">All streams</h2>{tables}</section>')
    body += [_section_html(section, files) for section in sections]
    body.append(_cards(settings))
    if failures:
        body.append(_failures(failures))
    html = PAGE.substitute(
        title=escape(title or _title(settings)),
        style=_palette() + _asset("style.css"),
        script=_asset("script.js"),
        about=escape(_about(settings)),
        warnings=_warnings(settings, failures),
        headline="".join(f"<p>{escape(headline(setting))}</p>" for setting in settings),
        navigation=_navigation(settings, bool(overviews), bool(failures)),
        body="\n".join(body),
        footer=(
            "Accuracy is scored on each batch before the update it causes. Subscripts are unbiased "
            "standard deviations over seeds; bold is the best of a column, underlined the second. "
            f"Figures (SVG, PNG, PDF) and tables (CSV, Markdown, LaTeX) are in "
            f"<code>{escape(files)}/</code>."
        ),
    )
    tables_made = overviews + [table for section in sections for table in section.tables]
    drawn = [p for section in sections for p in (*section.pictures, *section.expert_pictures)]
    return Report(html, tables_made, drawn)


def _asset(name: str) -> str:
    return (resources.files("moetta.report") / name).read_text(encoding="utf-8")


def _palette() -> str:
    colors = "".join(
        f"--c-{name}: light-dark({light}, {dark}); " for name, (light, dark, *_) in STYLES.items()
    )
    return f":root {{ {colors}}}\n"


def _section(setting: Setting) -> Section:
    tables = [
        contents.accuracies(setting),
        contents.beyond(setting),
        contents.costs(setting),
        contents.domains(setting),
    ]
    drawn = [over_stream(setting), pareto(setting), by_domain(setting)]
    return Section(
        setting,
        [table for table in tables if table.rows and len(table.columns) > 1],
        [item for item in drawn if item is not None],
        expert_pictures(setting),
    )


def _section_html(section: Section, files: str) -> str:
    setting = section.setting
    main, *more = section.tables
    parts = [
        f'<section><h2 id="{slug(setting.model, setting.stream)}">{escape(setting.name)}</h2>',
        to_html(main, files),
        _figures(section.pictures, files),
    ]
    if section.expert_pictures:
        parts.append("<h3>The experts</h3>")
        parts.append(_figures(section.expert_pictures, files))
    parts += [to_html(table, files) for table in more]
    return "".join(parts) + "</section>"


def _figures(pictures: Sequence[Picture], files: str) -> str:
    if not pictures:
        return ""
    return '<div class="figures">' + "".join(_figure(p, files) for p in pictures) + "</div>"


def _figure(picture: Picture, files: str) -> str:
    links = " ".join(
        f'<a href="{escape(files, quote=True)}/{picture.name}.{end}">{end.upper()}</a>'
        for end in picture.files
    )
    return (
        f'<figure id="{picture.name}"><h3>{escape(picture.title)}</h3>{inline_svg(picture)}'
        f"<figcaption>{escape(picture.caption)}</figcaption>"
        f'<p class="files">{links}</p></figure>'
    )


def _title(settings: Sequence[Setting]) -> str:
    streams = list(dict.fromkeys(setting.stream for setting in settings))
    if len(streams) > 3:
        return f"Test-time adaptation on {len(streams)} streams"
    return f"Test-time adaptation on {', '.join(streams)}"


def _about(settings: Sequence[Setting]) -> str:
    groups = [group for setting in settings for group in setting.groups]
    runs = [run for group in groups for run in group.runs]
    methods = {group.method for group in groups}
    seeds = {run.seed for run in runs}
    days = sorted({str(run.card.get("created") or "")[:10] for run in runs} - {""})
    when = f", made {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    models = list(dict.fromkeys(setting.model for setting in settings))
    named = " and ".join(models) if len(models) <= 2 else f"{len(models)} models"
    return (
        f"{_count(len(runs), 'run')}: {_count(len(methods), 'method')}, "
        f"{_count(len({setting.stream for setting in settings}), 'stream')}, "
        f"{_count(len(seeds), 'seed')}, {named}{when}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _warnings(settings: Sequence[Setting], failures: Sequence[Failure]) -> str:
    lines = []
    for setting in settings:
        for number, text in enumerate(setting.deviations, start=2):
            lines.append(
                f"Mixed protocols on {setting.name}: methods marked [protocol {number}] are not "
                f"comparable with the rest; they differ in {text}."
            )
    lost = sum(failure.lost for failure in failures)
    if failures:
        damaged = len(failures) - lost
        told = [f"{_count(lost, 'folder')} left out"] if lost else []
        told += [f"{_count(damaged, 'file')} not readable"] if damaged else []
        lines.append(f"Not everything could be shown: {', '.join(told)} (listed at the end).")
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="warning" aria-label="Warnings"><ul>{items}</ul></section>'


def _navigation(settings: Sequence[Setting], overview: bool, failures: bool) -> str:
    links = [("overview", "All streams")] if overview else []
    links += [(slug(s.model, s.stream), s.name) for s in settings]
    links += [("cards", "Protocol")] + ([("failures", "Not shown")] if failures else [])
    if len(links) < 3:
        return ""
    items = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _cards(settings: Sequence[Setting]) -> str:
    parts = [
        '<section><h2 id="cards">Protocol cards</h2>'
        "<p>What each figure means: the model and its weights, the stream, the configuration, the "
        "versions. One card a method; its seeds share it.</p>"
    ]
    for setting in settings:
        cards = "".join(_card(group) for group in setting.in_order())
        parts.append(f"<details><summary>{escape(setting.name)}</summary>{cards}</details>")
    return "".join(parts) + "</section>"


def _card(group: Group) -> str:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    folders = ", ".join(run.folder.name for run in group.runs[:3])
    more = f" and {len(group.runs) - 3} more" if len(group.runs) > 3 else ""
    shown = {name: value for name, value in group.runs[0].card.items() if name != "cell"}
    text = json.dumps(shown, indent=1, ensure_ascii=False)  # the cell's paths are private
    return (
        f"<details><summary>{escape(group.label)}: seeds {seeds}</summary>"
        f"<p>From <code>{escape(folders)}</code>{more}.</p><pre>{escape(text)}</pre></details>"
    )


def _failures(failures: Sequence[Failure]) -> str:
    items = "".join(
        f"<li><code>{escape(_where(failure))}</code>: {escape(failure.reason)}</li>"
        for failure in failures
    )
    return f'<section class="warning"><h2 id="failures">Not shown</h2><ul>{items}</ul></section>'


def _where(failure: Failure) -> str:
    """The folder, and the file where only that is damaged; the rest of the path is private."""
    return failure.path.name if failure.lost else "/".join(failure.path.parts[-2:])
