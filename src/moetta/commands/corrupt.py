"""`moetta corrupt`: writes an ImageNet-C-style tree and shows its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moetta.data.corrupt_tree import CorruptOptions, corrupt_tree

_LINE_EVERY = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class Corrupt(CorruptOptions):
    """Write corrupted copies of the images in SRC to DST, laid out like ImageNet-C."""

    src: tyro.conf.Positional[Path]
    """Folder of images, usually with one folder per class."""
    dst: tyro.conf.Positional[Path]
    """Where to write <corruption>/<severity>/<class>/<name>.JPEG; a stopped run continues there."""


def corrupt(options: Corrupt) -> None:
    """Write the tree; progress goes to standard error."""
    console = Console(stderr=True)
    with _Meter(console) as meter:
        summary = corrupt_tree(options, meter.report)
    console.print(
        f"{summary.written} written, {summary.present} already there, "
        f"{len(summary.unreadable)} images skipped",
        highlight=False,
    )


class _Meter:
    """A progress bar in a terminal; elsewhere a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("corrupting"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, done: int, total: int, problem: str | None) -> None:
        """Show how many of the files are done, and why an image was skipped."""
        if problem is not None:
            self._console.print(f"skipped: {problem}", markup=False, soft_wrap=True)
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        due = done >= total or (done > 0 and now - self._last >= _LINE_EVERY)
        if due and not self._console.is_terminal:
            self._last = now
            left = (now - self._start) * (total - done) / done
            self._console.print(
                f"{done}/{total} files ({done / total:.0%}), about {left:.0f} s left",
                markup=False,
                highlight=False,
            )
