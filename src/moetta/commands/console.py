"""The console that commands print tables on."""

from __future__ import annotations

from rich.console import Console


def make_console(stderr: bool = False) -> Console:
    """A console; one that writes to a file or pipe is wide enough for any table."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=170)
