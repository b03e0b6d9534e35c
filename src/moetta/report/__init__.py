"""The report: tables and figures out of results, on one page."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moetta.report.page import Report, build
from moetta.results.groups import settings
from moetta.results.read import load
from moetta.results.tables import to_csv, to_latex, to_markdown

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ReportOptions:
    """Make one HTML page, and figures and tables as files, out of results.

    Attributes:
        runs: Results folders: roots such as runs/, or folders of single runs.
        out: The page; its figures and tables go beside it, into <name>_files/.
        allow_mixed: Accept runs of different protocols, and mark them.
        title: The page's title; by default made from the streams.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    allow_mixed: bool = False
    title: str | None = None


def report_command(options: ReportOptions) -> None:
    """Write the report and say where it is."""
    page = write(options.runs, options.out, allow_mixed=options.allow_mixed, title=options.title)
    print(f"wrote {page} and {_beside(page)}/")


def write(
    runs: Sequence[Path], out: Path, *, allow_mixed: bool = False, title: str | None = None
) -> Path:
    """Write a report of the runs: the page, and beside it all figures and tables as files.

    Args:
        runs: Results folders: roots, or folders of single runs.
        out: The page.
        allow_mixed: Accept runs of different protocols, and mark them.
        title: The page's title; by default made from the streams.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: A folder does not exist.
        ValueError: There is no finished run to show, or runs of one model on one stream differ in
            protocol; says in what.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name the page, such as {out / 'report.html'}")
    paths = [Path(path) for path in runs]
    found, failures = load(paths)
    if not found:
        where = ", ".join(map(str, paths)) or "no folder"
        reasons = "".join(f"\n  {f.path}: {f.reason}" for f in failures[:10])
        raise ValueError(
            f"no finished run in {where}; make some with `moetta demo` or `moetta run`{reasons}"
        )
    made, repeats = settings(found, allow_mixed=allow_mixed)
    report = build(made, [*failures, *repeats], _beside(out).name, title)
    _write(report, out)
    return out


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}_files")


def _write(report: Report, out: Path) -> None:
    """Put everything in place at once: complete files only, the page last."""
    contents: dict[str, bytes] = {}
    for table in report.tables:
        forms = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
        for ending, render in forms.items():
            contents[f"{table.name}.{ending}"] = render(table).encode()
    for picture in report.pictures:
        contents |= {f"{picture.name}.{end}": data for end, data in picture.files.items()}
    contents[MANIFEST] = json.dumps(sorted(contents), indent=1).encode()
    folder = _beside(out)
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
        # Only what an earlier report wrote here may go; anything else belongs to somebody.
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
