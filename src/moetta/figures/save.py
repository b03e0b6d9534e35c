"""Figures as bytes and as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from moetta.figures.theme import look
from moetta.files import write_atomically

# Leaves out what would change from one rendering to the next.
METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


def render(figure: Figure, form: str) -> bytes:
    """A figure as svg, png or pdf; the same figure always gives the same bytes."""
    if form not in METADATA:
        raise ValueError(f"form must be one of {', '.join(METADATA)}, got {form!r}")
    out = io.BytesIO()
    # A page gives its SVGs a background; other files may be viewed on any.
    background = "none" if form == "svg" else "white"
    with look():
        figure.savefig(out, format=form, dpi=160, metadata=METADATA[form], facecolor=background)
    return out.getvalue()


def save(figure: Figure, stem: Path, forms: Sequence[str] = ("svg", "png", "pdf")) -> None:
    """Write a figure as STEM.svg, STEM.png and STEM.pdf."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for form in forms:
        write_atomically(stem.with_name(f"{stem.name}.{form}"), render(figure, form))
