"""How figures look, and how they are turned into SVG for the page and files for papers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

from moetta.results import Group

WIDTH = 4.6  # inches: at a phone's width the labels stay legible
SHOWN = 9  # groups drawn in colour; more would only hide each other

# Stand-ins that the page replaces, so that the figures follow its light or dark theme.
INK, GRID, FAINT = "#23272e", "#dfe2e6", "#a9aeb6"
THEMED = {INK: "currentColor", GRID: "var(--grid)", FAINT: "var(--faint)"}

# A colour, a marker and a dash a method: told apart without colour too.
# Light-theme and dark-theme colours, each at least 3:1 against its background.
STYLES: dict[str, tuple[str, str, str, Any]] = {
    "noadapt": ("#6b7077", "#a3a9b3", "o", (0, (1, 1))),
    "tent": ("#b8327d", "#f58cc5", "s", "-"),
    "eata": ("#0e7c5b", "#3ecf9c", "^", "-"),
    "cotta": ("#0a7f96", "#4fcbe0", "v", "--"),
    "sar": ("#8a6a00", "#dcbf3d", "D", "-"),
    "deyo": ("#7a46b8", "#c19cf5", "P", "--"),
    "mgtta": ("#c2560c", "#ff9c54", "X", "-"),
    "becotta": ("#8c3b2a", "#e39683", "p", "--"),
    "moetta": ("#0b5cad", "#62aeff", "*", "-"),
}


@dataclass(frozen=True)
class Style:
    """How one group is drawn."""

    color: str
    marker: str
    dash: Any
    width: float = 1.4


@dataclass(frozen=True)
class Picture:
    """A finished figure.

    Attributes:
        name: Its file name without ending.
        title: The heading above it.
        caption: What is seen, one or two sentences.
        alt: The same for those who cannot see it, with the figures that matter.
        files: Its bytes by ending: svg, png, pdf.
    """

    name: str
    title: str
    caption: str
    alt: str
    files: dict[str, bytes]


def styles(groups: Sequence[Group]) -> dict[str, Style]:
    """A style for each label: a method has its own, its variants take those left over."""
    taken: dict[str, Style] = {}
    plain = [g for g in groups if not g.variant and g.method in STYLES and g.protocol == 0]
    for group in plain:
        light, _, marker, dash = STYLES[group.method]
        wide = 2.4 if group.method == "moetta" else 1.4
        # Several configurations of a method: the first keeps its colour.
        if not any(style.color == light for style in taken.values()):
            taken[group.label] = Style(light, marker, dash, wide)
    used = {style.color for style in taken.values()}
    free = [s for name, s in STYLES.items() if s[0] not in used and name != "noadapt"]
    for group in groups:
        if group.label in taken:
            continue
        if free:
            light, _, marker, dash = free.pop()
            taken[group.label] = Style(light, marker, dash)
        else:
            taken[group.label] = Style(FAINT, ".", "-", 0.8)
    return taken


def chosen(groups: Sequence[Group]) -> list[Group]:
    """The groups drawn in colour, best first: the best, the methods as they are, then variants."""
    if len(groups) <= SHOWN:
        return list(groups)
    rest = sorted(
        groups[1:], key=lambda g: (g.variant is not None, g.method not in ("noadapt", "moetta"))
    )
    ranked = [groups[0], *rest]
    return [group for group in groups if group in ranked[:SHOWN]]


@contextmanager
def look() -> Iterator[None]:
    """The settings of all figures; the caller's own are left as they were."""
    with matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.labelsize": 9,
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
            "text.parse_math": False,  # a dollar in a name is a dollar
            "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
            "svg.hashsalt": "moetta",  # the same figure gives the same bytes
            "pdf.fonttype": 42,
        }
    ):
        yield


def canvas(height: float, width: float = WIDTH) -> Canvas:
    """An empty figure that no global state knows of."""
    # The browser's letters may be a little wider than those measured here: hence the padding.
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
    figure = Canvas(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)  # measures text, which placing labels needs
    return figure


def legend_below(figure: Canvas, axes: Any, columns: int = 3) -> None:
    """A legend under the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [label if len(label) <= 34 else f"{label[:32]}…" for label in labels]
    longest = max((len(label) for label in labels), default=0)
    columns = 1 if longest > 26 else 2 if longest > 15 else columns
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.4)


def picture(name: str, title: str, caption: str, alt: str, figure: Canvas) -> Picture:
    """Render a figure in all its forms."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not again for each form
    files = {}
    for ending in ("svg", "png", "pdf"):
        out = io.BytesIO()
        metadata = {
            "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
            "png": {"Software": None},
            "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        }[ending]
        # Files are looked at on any background; the page gives the SVG its own.
        background = "none" if ending == "svg" else "white"
        figure.savefig(out, format=ending, dpi=160, metadata=metadata, facecolor=background)
        files[ending] = out.getvalue()
    return Picture(name, title, caption, alt, files)


def inline_svg(picture: Picture) -> str:
    """The SVG as part of a page: own identifiers, the page's colours, named for screen readers."""
    text = picture.files["svg"].decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    mark = re.sub(r"[^a-z0-9-]", "-", picture.name)
    text = re.sub(r'\bid="', f'id="{mark}--', text)
    text = re.sub(r"url\(#", f"url(#{mark}--", text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{mark}--', text)
    colors = {**THEMED, **{style[0]: f"var(--c-{name})" for name, style in STYLES.items()}}
    text = re.sub("#[0-9a-f]{6}", lambda found: colors.get(found[0], found[0]), text)
    opening, rest = text.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', opening)
    return (
        f'<svg {view[0] if view else ""} role="img" aria-labelledby="{mark}--title">'
        f'<title id="{mark}--title">{_escape(picture.alt)}</title>{rest.strip()}'
    )


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
