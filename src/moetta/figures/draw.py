"""Lines, points and bars, and the labels beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moetta.figures.theme import (
    FAINT,
    INK,
    NAMES,
    PALETTE,
    WIDTH,
    canvas,
    look,
    shortened,
    text_width,
)

LABEL = 7.5  # points: labels within the axes


@dataclass(frozen=True, eq=False)
class Curve:
    """A line of a figure.

    Attributes:
        label: Its name, written at its end; empty for none.
        x: Where its points are.
        y: Their values.
        sd: Their standard deviations, drawn as a band.
        color: Grey for a line in the background.
        marker: Marks a few of its points, so that lines can be told apart without colour.
        dash: "-", "--", ":" or "-.".
        width: Width of the line.
    """

    label: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    sd: np.ndarray | None = None
    color: str = FAINT
    marker: str = ""
    dash: str = "-"
    width: float = 1.4

    @property
    def quiet(self) -> bool:
        """Whether it is drawn in the background."""
        return self.color == FAINT


def label_room(names: Sequence[str]) -> float:
    """The margin needed for names at the ends of lines, in inches."""
    widest = max((text_width(shortened(name, NAMES), LABEL) for name in names), default=0)
    return 0.2 + widest


def draw_lines(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw lines, each with its name at its end; there is no legend."""
    for curve in curves:
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        axes.plot(
            x,
            y,
            color=curve.color,
            linestyle=curve.dash,
            linewidth=0.7 if curve.quiet else curve.width,
            marker=curve.marker or None,
            markersize=4,
            markevery=max(1, len(x) // 8),
            zorder=1 if curve.quiet else 3,
        )
        if curve.sd is not None and np.isfinite(curve.sd).any():
            axes.fill_between(
                x, y - curve.sd, y + curve.sd, color=curve.color, alpha=0.15, linewidth=0, zorder=2
            )
    _end_labels(axes, [curve for curve in curves if curve.label])


def _end_labels(axes: Any, curves: Sequence[Curve]) -> None:
    """Write names beside the ends of lines, moved apart so that they do not overlap."""
    ends = []
    for curve in curves:
        known = np.flatnonzero(np.isfinite(np.asarray(curve.y, dtype=float)))
        if known.size:
            last = known[-1]
            ends.append((float(curve.y[last]), float(curve.x[last]), curve))
    if not ends:
        return
    ends.sort(key=lambda end: end[0])
    figure = axes.get_figure()
    tall = axes.get_position().height * figure.get_figheight() * 72  # points
    low, high = axes.get_ylim()
    gap = 1.18 * LABEL
    wanted = [tall * (value - low) / (high - low) for value, _, _ in ends]
    # The top margin has room for half a line.
    places = _spread(wanted, gap, -gap, max(tall + gap / 2, gap * len(ends) - 1.5 * gap))
    for (value, end, curve), place in zip(ends, places, strict=True):
        axes.annotate(
            shortened(curve.label, NAMES),
            (end, value),
            xytext=(1 + 7 / (axes.get_position().width * figure.get_figwidth() * 72), place / tall),
            xycoords="data",
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL,
            color=INK if curve.quiet else curve.color,
            arrowprops={
                "arrowstyle": "-",
                "color": curve.color,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),  # up to the name, not through it
            },
            annotation_clip=False,
        )


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves sorted places as little as possible so that neighbours are a gap apart."""
    places = list(wanted)
    for _ in range(60):
        moved = False
        for i in range(1, len(places)):
            short = gap - (places[i] - places[i - 1])
            if short > 1e-6:
                places[i - 1] -= short / 2
                places[i] += short / 2
                moved = True
        if not moved:
            break
    for i in range(len(places)):  # within the bounds, from below and then from above
        places[i] = max(places[i], low + i * gap)
    for i in range(len(places)):
        places[-1 - i] = min(places[-1 - i], high - i * gap)
    return places


def count_axis(axes: Any, label: str) -> None:
    """Labels an x axis of counts."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


@look()
def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    leaders: Collection[str] | None = None,
) -> Figure:
    """Several named lines.

    Args:
        curves: The points of each line.
        x: What the x axis shows.
        y: What the y axis shows.
        leaders: The lines drawn in colour and named; by default as many as there are colours.
    """
    named = list(leaders if leaders is not None else list(curves)[: len(PALETTE)])
    figure = canvas(2.9, right=label_room(named), width=WIDTH + 0.8)
    axes = figure.subplots()
    made = [Curve("", *points) for name, points in curves.items() if name not in named]
    for place, name in enumerate(name for name in named if name in curves):
        color, marker = PALETTE[place % len(PALETTE)]
        made.append(Curve(name, *curves[name], color=color, marker=marker))
    axes.set(xlabel=x, ylabel=y)
    draw_lines(axes, made)
    return figure


@look()
def points(places: Mapping[str, np.ndarray]) -> Figure:
    """Named clouds of points [n, 2] in a plane whose axes mean nothing."""
    rows = -(-len(places) // 3)
    figure = canvas(4.6 + 0.2 * rows, left=0.1, right=0.1, top=0.1, bottom=0.15 + 0.2 * rows)
    axes = figure.subplots()
    for place, (name, xy) in enumerate(places.items()):
        color = PALETTE[place % len(PALETTE)][0]
        axes.scatter(xy[:, 0], xy[:, 1], s=4, alpha=0.6, label=name, color=color, linewidths=0)
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    figure.legend(loc="lower center", ncols=3, markerscale=3)
    return figure


@look()
def bars(values: Sequence[float] | np.ndarray, names: Sequence[str], y: str, color: str) -> Figure:
    """One bar per name."""
    figure = canvas(2.5, bottom=0.3 + _names_room(names))
    axes = figure.subplots()
    axes.bar(np.arange(len(values)), values, color=color, width=0.75)
    axes.set_ylabel(y)
    axes.set_ylim(0, max(0.05, float(np.max(values)) * 1.1))
    axes.grid(visible=False, axis="x")
    name_axis(axes, names)
    return figure


def _names_room(names: Sequence[str]) -> float:
    return 0.7 * max((text_width(_tail(name), 7) for name in names), default=0)


def name_axis(axes: Any, names: Sequence[str]) -> None:
    """Labels an x axis with names, as many as stay legible."""
    step = max(1, -(-len(names) // 14))
    shown = range(0, len(names), step)
    axes.set_xticks(
        list(shown),
        [_tail(names[place]) for place in shown],
        rotation=45,
        ha="right",
        rotation_mode="anchor",
        fontsize=7,
    )


def _tail(name: str) -> str:
    return name if len(name) <= 16 else f"…{name[-15:]}"


Spot = tuple[float, float]
Box = tuple[float, float, float, float]
# Where a name may stand beside its point, in points; a thin line leads to the far places.
PLACES = (
    (7, 0, "left"), (7, -9, "left"), (7, 9, "left"), (-7, 0, "right"), (-7, -9, "right"),
    (-7, 9, "right"), (0, 10, "center"), (0, -10, "center"), (12, 18, "left"),
    (12, -18, "left"), (-12, 18, "right"), (-12, -18, "right"), (12, -27, "left"),
    (12, 27, "left"), (-12, -27, "right"), (-12, 27, "right"),
)  # fmt: skip


def label_points(
    axes: Any,
    spots: Sequence[tuple[str, float, float]],
    colors: Mapping[str, str] | None = None,
    steps: Sequence[Spot] = (),
) -> None:
    """Name points where the name covers no other name, point or line; skip what does not fit.

    The limits of the axes must be final.

    Args:
        axes: Where the points are drawn.
        spots: Names and places; the first ones choose first.
        colors: The colours of some of the names.
        steps: The corners of a line of level and upright pieces.
    """
    figure = axes.get_figure()
    wide, tall = figure.get_figwidth() * 72, figure.get_figheight() * 72
    box = axes.get_position()
    frame = (box.x0 * wide, box.y0 * tall, box.x1 * wide, box.y1 * tall)
    scale = 72 / figure.dpi
    dots = [axes.transData.transform((x, y)) * scale for _, x, y in spots]
    placed: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    corners = [axes.transData.transform(corner) * scale for corner in steps]
    for a, b in pairwise(corners):
        placed.append((*(np.minimum(a, b) - 0.5), *(np.maximum(a, b) + 0.5)))
    for (name, x, y), dot in zip(spots, dots, strict=True):
        text = shortened(name, NAMES)
        width = text_width(text, LABEL) * 72
        for dx, dy, side in PLACES:
            start = dot[0] + dx - {"left": 0, "right": width, "center": width / 2}[side]
            middle = dot[1] + dy
            spot = (start, middle - 0.6 * LABEL, start + width, middle + 0.6 * LABEL)
            inside = (
                frame[0] <= spot[0]
                and spot[2] <= frame[2] + 8
                and frame[1] <= spot[1]
                and spot[3] <= frame[3] + 6
            )
            if not inside or any(_overlap(spot, other) for other in placed):
                continue
            far = abs(dy) > LABEL + 4
            way = [dot + share * np.array([dx, dy]) for share in (0.4, 0.6, 0.8)] if far else []
            if any(_overlap((*on, *on), other) for on in way for other in placed):
                continue
            axes.annotate(
                text, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side,
                va="center", fontsize=LABEL, color=(colors or {}).get(name, INK),
                arrowprops={
                    "arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0,
                    "shrinkB": 3, "relpos": (float(side == "right"), 0.5),
                } if far else None,
            )  # fmt: skip
            placed.append(spot)
            break


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
