"""How all figures look: fonts, colours, and the size of the page they are drawn on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

WIDTH = 4.6  # inches; labels stay legible on a phone
NAMES = 22  # characters of a name beside the axes
INK, GRID, FAINT = "#23272e", "#dfe2e6", "#a9aeb6"

# The markers tell lines apart where the colours cannot.
PALETTE: tuple[tuple[str, str], ...] = (
    ("#0b5cad", "o"),
    ("#c2560c", "X"),
    ("#0e7c5b", "^"),
    ("#b8327d", "s"),
    ("#7a46b8", "P"),
    ("#8a6a00", "D"),
    ("#0a7f96", "v"),
    ("#8c3b2a", "p"),
)
LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
CONTRAST = 3.0  # WCAG's minimum for graphics

LOOK: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "svg.hashsalt": "moetta",  # the same figure gives the same bytes
    "pdf.fonttype": 42,
}


@contextmanager
def look() -> Iterator[None]:
    """Draw with our theme; the caller's settings are restored afterwards."""
    with matplotlib.rc_context(LOOK):
        yield


def canvas(
    height: float,
    *,
    left: float = 0.62,
    right: float = 0.15,
    top: float = 0.15,
    bottom: float = 0.5,
    width: float = WIDTH,
) -> Figure:
    """An empty figure with margins in inches.

    The margins are fixed because a layout engine that measures every text would be slow.
    """
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height
    )
    return figure


def text_width(text: str, size: float) -> float:
    """The approximate width of a text, in inches.

    It errs on the wide side, since the reader's font may be wider than ours.
    """
    return len(text) * size * 0.6 / 72


def shortened(text: str, most: int) -> str:
    """A text cut to a number of characters."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def on_light(color: str) -> str:
    """A colour, darkened if necessary until it stands out from white.

    >>> on_light("#0b5cad"), contrast(on_light("#ffe119"), LIGHT_PAPER) >= CONTRAST
    ('#0b5cad', True)
    """
    return _moved(color, "#000000", LIGHT_PAPER, CONTRAST)


def on_dark(color: str) -> str:
    """A colour, lightened if necessary until it stands out from a dark page."""
    # More than the minimum, since thin dark lines are hard to see.
    return _moved(color, "#ffffff", DARK_PAPER, 2 * CONTRAST)


def _moved(color: str, towards: str, paper: str, needed: float) -> str:
    start, end = _channels(color), _channels(towards)
    for step in range(21):
        mixed = [round(a + (b - a) * step / 20) for a, b in zip(start, end, strict=True)]
        found = "#" + "".join(f"{value:02x}" for value in mixed)
        if contrast(found, paper) >= needed:
            break
    return found


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours, from 1 to 21."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def difference(a: str, b: str) -> float:
    """How different two colours look: their distance in CIELAB; below about 20 lines look alike.

    >>> round(difference("#c2560c", "#b45309")), round(difference("#c2560c", "#0b5cad"))
    (5, 111)
    """
    return math.dist(_lab(a), _lab(b))


def _lab(color: str) -> tuple[float, float, float]:
    red, green, blue = (_linear(value / 255) for value in _channels(color))
    x = (0.4125 * red + 0.3576 * green + 0.1804 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9503 * blue) / 1.0888
    cubes = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return 116 * cubes[1] - 16, 500 * (cubes[0] - cubes[1]), 200 * (cubes[1] - cubes[2])


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _channels(color: str) -> list[int]:
    return [int(color[place : place + 2], 16) for place in (1, 3, 5)]


def _luminance(color: str) -> float:
    red, green, blue = (_linear(value / 255) for value in _channels(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
