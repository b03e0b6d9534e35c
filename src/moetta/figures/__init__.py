"""Figures: one theme, a few drawing functions, saving as SVG, PNG and PDF. Imports no torch."""

from moetta.figures.draw import (
    Curve,
    bars,
    draw_lines,
    label_points,
    lines,
    points,
)
from moetta.figures.heat_maps import heat_map, heat_maps
from moetta.figures.save import render, save
from moetta.figures.theme import (
    FAINT,
    GRID,
    INK,
    PALETTE,
    WIDTH,
    canvas,
    look,
    on_dark,
    on_light,
    shortened,
)

__all__ = [
    "FAINT",
    "GRID",
    "INK",
    "PALETTE",
    "WIDTH",
    "Curve",
    "bars",
    "canvas",
    "draw_lines",
    "heat_map",
    "heat_maps",
    "label_points",
    "lines",
    "look",
    "on_dark",
    "on_light",
    "points",
    "render",
    "save",
    "shortened",
]
