"""Hints for what was misspelt: the nearest name that exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid ones, or all of them."""
    options = list(valid)
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(map(repr, close))}?"
        if close
        else f"valid: {', '.join(options)}"
    )


def nearest_path(path: Path) -> str:
    """A hint for a path that does not exist, to put behind it: " (did you mean runs?)", or ""."""
    lost = next((p for p in (path, *path.parents) if p.parent.is_dir()), path)
    names = sorted(p.name for p in lost.parent.glob("*"))
    close = difflib.get_close_matches(lost.name, names, n=1, cutoff=0.5)
    return f" (did you mean {lost.parent / close[0]}?)" if close else ""
