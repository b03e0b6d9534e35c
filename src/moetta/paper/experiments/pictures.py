"""Plain pictures of what is no run: heat maps, lines and points, as SVG, PNG and PDF."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moetta.files import write_atomically

Values = Sequence[Sequence[float | None]]


def save(figure: Figure, stem: Path) -> None:
    """Write a figure in three forms."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("svg", "png", "pdf"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=ending, dpi=150)
        write_atomically(stem.with_name(f"{stem.name}.{ending}"), buffer.getvalue())


def heat_map(
    stem: Path,
    values: Values,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str = "",
    y: str = "",
    label: str = "",
) -> None:
    """A matrix in colours, with its numbers where there is room."""
    array = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    side = max(3.5, 0.45 * max(array.shape))
    figure = Figure(figsize=(side + 1.5, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(array, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90 if len(columns) > 8 else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=x, ylabel=y)
    figure.colorbar(image, label=label)
    middle = np.nanmean(array) if np.isfinite(array).any() else 0.0
    for (row, column), value in np.ndenumerate(array):
        if np.isfinite(value):
            color = "black" if value > middle else "white"
            text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    save(figure, stem)


def heat_maps(stem: Path, matrices: Mapping[str, np.ndarray]) -> None:
    """Many square matrices with values in -1..1 side by side, one colour scale."""
    across = min(6, len(matrices))
    down = -(-len(matrices) // across)
    figure = Figure(figsize=(1.9 * across + 1, 2.1 * down), layout="constrained")
    grid = np.atleast_1d(figure.subplots(down, across, squeeze=False)).ravel()
    for axes, (name, matrix) in zip(grid, matrices.items(), strict=False):
        image = axes.imshow(matrix, cmap="coolwarm", vmin=-1, vmax=1)
        axes.set_title(name, fontsize=7)
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in grid[len(matrices) :]:
        axes.axis("off")
    if matrices:
        figure.colorbar(image, ax=grid.tolist(), label="cosine")
    save(figure, stem)


def lines(
    stem: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str
) -> None:
    """Several curves."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, (across, up) in curves.items():
        axes.plot(across, up, marker="o", markersize=3, label=name)
    axes.set(xlabel=x, ylabel=y)
    if len(curves) <= 12:
        axes.legend(fontsize=8)
    save(figure, stem)


def points(stem: Path, places: Mapping[str, np.ndarray]) -> None:
    """Groups of points in the plane [n, 2]."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    for name, xy in places.items():
        axes.scatter(xy[:, 0], xy[:, 1], s=4, alpha=0.6, label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.legend(markerscale=3, fontsize=8)
    save(figure, stem)
