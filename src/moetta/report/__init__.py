"""The report: runs as one HTML page, with their tables and figures as files. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from moetta.report.page import Report, build
from moetta.results import Problem, Published, Run, compare
from moetta.results.tables import FORMS

MANIFEST = "manifest.json"


def write(
    runs: Sequence[Run],
    out: Path,
    *,
    problems: Sequence[Problem] = (),
    published: Mapping[tuple[str, str], Published] | None = None,
    allow_mixed: bool = False,
    title: str | None = None,
    figures: Sequence[str] = ("svg",),
) -> Path:
    """Write a report of the runs: the page, and next to it all figures and tables as files.

    Args:
        runs: What to report, as `moetta.results.load_runs` returns it.
        out: The page.
        problems: What could not be read; listed on the page.
        published: Published results to compare with ours, by model and stream.
        allow_mixed: Accept runs with different protocols, and mark them.
        title: The page's title; by default it names the streams.
        figures: File formats of the figures: svg, png, pdf.

    Returns:
        The page's path.

    Raises:
        ValueError: There is no run to report, or runs of one model on one stream differ in
            protocol; says in what.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name the page, such as {out / 'report.html'}")
    if not runs:
        raise ValueError("there are no runs to report")
    compared = compare(runs, allow_mixed=allow_mixed)
    folder = files_beside(out)
    report = build(compared, problems, folder.name, title, published or {}, figures)
    _write(report, out)
    return out


def files_beside(out: Path) -> Path:
    """The folder of a page's figures and tables."""
    return out.with_name(f"{out.stem}_files")


def _write(report: Report, out: Path) -> None:
    """Write all files elsewhere, then move them into place, the page last."""
    contents: dict[str, bytes] = {}
    for table in report.tables:
        for extension, form in FORMS.items():
            contents[f"{table.name}.{extension}"] = form(table).encode()
    contents |= report.figures
    contents[MANIFEST] = json.dumps(sorted(contents), indent=1).encode()
    folder = files_beside(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.stem}-", dir=out.parent))
    try:
        for name, data in contents.items():
            (staging / name).write_bytes(data)
        page = staging / "page"
        page.write_text(report.html, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        old = _written_before(folder)
        for name in contents:
            os.replace(staging / name, folder / name)
        # Remove only what an earlier report wrote here; the rest is not ours.
        for name in old - contents.keys():
            (folder / name).unlink(missing_ok=True)
        os.replace(page, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _written_before(folder: Path) -> set[str]:
    try:
        names = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {str(name) for name in names if Path(str(name)).name == name}
