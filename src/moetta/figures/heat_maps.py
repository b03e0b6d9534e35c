"""Heat maps: matrices in colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from moetta.figures.theme import NAMES, WIDTH, canvas, look, shortened, text_width

Values = Sequence[Sequence[float | None]] | np.ndarray


@look()
def heat_map(
    values: Values,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    label: str = "",
    x: str = "",
    y: str = "",
    colors: str = "cividis",
    limits: tuple[float, float] | None = None,
    form: str = ".2f",
) -> Figure:
    """A matrix in colours, with its numbers where they fit.

    Args:
        values: The matrix; None or NaN is left blank.
        rows: Names of the rows, from the top.
        columns: Names of the columns.
        label: What the colours mean.
        x: What the columns are.
        y: What the rows are.
        colors: A colour map of matplotlib.
        limits: Values at the ends of the colour map; by default those of the matrix.
        form: Format of the numbers.
    """
    matrix = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    tall = 0.21 if len(rows) <= 40 else 0.13
    size = 7.5 if tall > 0.2 else 6
    names = [shortened(name, NAMES) for name in rows]
    heads = [shortened(name, NAMES) for name in columns]
    left = 0.12 + max((text_width(name, size) for name in names), default=0) + (0.2 if y else 0)
    room = (WIDTH - left) / max(len(heads), 1)
    longest = max((text_width(head, 8) for head in heads), default=0)
    turned = longest > room
    top = 0.12 + (0.17 if x else 0) + (0.16 + 0.66 * longest if turned else 0.16)
    # A slanted name extends beyond the right edge.
    right = min(1.2, max(0.12, 0.7 * longest - room / 2)) if turned else 0.12
    height = tall * len(rows) + top + 0.62
    figure = canvas(height, left=left, right=right, top=top, bottom=0.62)
    axes = figure.subplots()
    norm = _mesh(axes, matrix, colors, limits)
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=size)
    axes.set_xticks(
        np.arange(len(columns)) + 0.5,
        heads,
        rotation=40 if turned else 0,
        ha="left" if turned else "center",
        rotation_mode="anchor" if turned else "default",
        fontsize=8,
    )
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set(xlabel=x, ylabel=y)
    cell = (WIDTH - left - right) / max(len(columns), 1)
    if tall > 0.2 and text_width(format(-10.0, form), 6.8) < cell + 0.05:
        axes.add_artist(_Numbers(matrix, norm, colors, form))
    _scale(figure, axes, norm, colors, label, height)
    return figure


def _mesh(
    axes: Any, matrix: np.ndarray, colors: str, limits: tuple[float, float] | None
) -> Normalize:
    """Draw a matrix as coloured rectangles, the first row at the top."""
    known = matrix[np.isfinite(matrix)]
    low, high = limits or ((known.min(), known.max()) if known.size else (0.0, 1.0))
    norm = Normalize(low, high if high > low else low + 1)
    axes.pcolormesh(matrix, cmap=colors, norm=norm, edgecolors="none")
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return norm


class _Numbers(Artist):
    """The numbers of a heat map, centred in its cells.

    One artist instead of hundreds: separate texts would take a third of the time of a report.
    """

    SIZE = 6.8
    WIDTHS: ClassVar = {".": 0.318, "-": 0.361, "+": 0.838}  # DejaVu Sans, in ems
    DIGIT = 0.636

    def __init__(self, matrix: np.ndarray, norm: Normalize, colors: str, form: str) -> None:
        super().__init__()
        self.set_zorder(3)  # above the mesh
        self.matrix, self.form = matrix, form
        shades = colormaps[colors](norm(matrix))
        self.dark = shades[..., :3] @ np.array([0.299, 0.587, 0.114]) < 0.5

    def draw(self, renderer: Any) -> None:
        """Write each known value."""
        font = FontProperties(size=self.SIZE)
        em = renderer.points_to_pixels(self.SIZE)
        _, tall = renderer.get_canvas_width_height()
        rows, columns = np.nonzero(np.isfinite(self.matrix))
        assert self.axes is not None
        middles = self.axes.transData.transform(np.stack((columns + 0.5, rows + 0.5), 1))
        pens = {}
        for dark, color in ((False, "#000000"), (True, "#ffffff")):
            pens[dark] = renderer.new_gc()
            pens[dark].set_foreground(color)
        for row, column, (x, y) in zip(rows, columns, middles, strict=True):
            text = format(self.matrix[row, column], self.form)
            x -= em * sum(self.WIDTHS.get(sign, self.DIGIT) for sign in text) / 2
            y -= 0.36 * em  # half of a digit's height
            pen = pens[bool(self.dark[row, column])]
            renderer.draw_text(pen, x, tall - y if renderer.flipy() else y, text, font, 0)
        for pen in pens.values():
            pen.restore()


def _scale(
    figure: Figure, axes: Any, norm: Normalize, colors: str, label: str, height: float
) -> None:
    """The colour scale, below the axes."""
    box = axes.get_position()
    place = (box.x0 + 0.1 * box.width, 0.44 / height, 0.8 * box.width, 0.07 / height)
    bar = figure.add_axes(place)
    # A few dozen steps look smooth and keep the file small.
    bar.pcolormesh(
        np.linspace(norm.vmin or 0.0, norm.vmax or 1.0, 49),
        [0, 1],
        np.linspace(norm.vmin or 0.0, norm.vmax or 1.0, 48)[None],
        cmap=colors,
        norm=norm,
        edgecolors="face",
        linewidth=0.2,
    )
    bar.grid(visible=False)
    bar.set_yticks([])
    bar.spines[:].set_visible(False)
    bar.xaxis.set_major_locator(MaxNLocator(6))
    bar.set_xlabel(label, labelpad=1)


@look()
def heat_maps(matrices: Mapping[str, np.ndarray], label: str = "cosine") -> Figure:
    """Many square matrices with values from -1 to 1 side by side, on one colour scale."""
    across = max(1, min(6, len(matrices)))
    down = max(1, -(-len(matrices) // across))
    width, height = 1.5 * across + 0.3, 1.75 * down + 0.75
    figure = canvas(height, left=0.15, right=0.15, top=0.3, bottom=0.75, width=width)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    norm = Normalize(-1, 1)
    for axes, (name, matrix) in zip(grid, matrices.items(), strict=False):
        _mesh(axes, np.asarray(matrix, dtype=float), "coolwarm", (-1, 1))
        axes.set_title(shortened(name, NAMES), fontsize=7)
        axes.set(xticks=[], yticks=[], aspect="equal")
    for axes in grid[len(matrices) :]:
        axes.axis("off")
    _scale(figure, grid[(down - 1) * across], norm, "coolwarm", label, height)
    return figure
