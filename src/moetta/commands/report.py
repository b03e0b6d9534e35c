"""`moetta report`: finished runs as one HTML page, with figures and tables as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moetta import report
from moetta.paper.beside import published_for
from moetta.results import load_runs

Form = Literal["svg", "png", "pdf"]


@dataclass(frozen=True)
class ReportOptions:
    """Make one HTML page, with its figures and tables as files beside it."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Results folders: roots such as runs/, or folders of single runs."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page; its figures and tables go into <name>_files/ beside it."""
    allow_mixed: bool = False
    """Accept runs with different protocols, and mark them."""
    title: str | None = None
    """The page's title; by default it names the streams."""
    figures: tuple[Form, ...] = ("svg",)
    """File formats of the figures: svg, png, pdf."""


def report_command(options: ReportOptions) -> None:
    """Write the report and say where it is."""
    page = make_report(
        options.runs,
        options.out,
        allow_mixed=options.allow_mixed,
        title=options.title,
        figures=options.figures,
    )
    print(f"wrote {page} and {report.files_beside(page)}/")


def make_report(
    paths: Sequence[Path],
    out: Path,
    *,
    allow_mixed: bool = False,
    title: str | None = None,
    figures: Sequence[Form] = ("svg",),
) -> Path:
    """The page of the runs in some folders, with the paper's figures beside ours."""
    runs, problems = load_runs(paths)
    if not runs:
        reasons = "".join(f"\n  {problem}" for problem in problems[:10])
        raise ValueError(
            f"no finished run in {', '.join(map(str, paths))}; make some with `moetta demo` or "
            f"`moetta run`{reasons}"
        )
    return report.write(
        runs,
        out,
        problems=problems,
        published=published_for(runs),
        allow_mixed=allow_mixed,
        title=title,
        figures=figures,
    )
