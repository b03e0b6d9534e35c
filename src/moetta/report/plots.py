"""The pictures of accuracy and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moetta.report.contents import domain_accuracy, domain_names
from moetta.report.figures import (
    FAINT,
    INK,
    STYLES,
    WIDTH,
    Picture,
    canvas,
    chosen,
    legend_below,
    picture,
    styles,
)
from moetta.report.frames import Frames
from moetta.results import Comparison, Group, slug

WINDOW = 1000  # images that a point of the curve should stand for
POINTS = 40
COVERS = 10.0  # the cost of a label on another

Curve = tuple[np.ndarray, np.ndarray, np.ndarray]


def over_stream(comparison: Comparison, frames: Frames) -> Picture | None:
    """Accuracy in windows along the stream."""
    curves = {
        g.label: c for g in comparison.groups if (c := _curve(g, "correct", frames)) is not None
    }
    if not curves:
        return None
    main = chosen([group for group in comparison.groups if group.label in curves])
    style = styles(main)
    rows = len(main) if max(len(group.short) for group in main) > 26 else len(main) / 2
    figure = canvas(2.7 + 0.17 * rows)  # the legend takes its own room
    axes = figure.subplots()
    others = [label for label in curves if label not in style]
    for place, label in enumerate(others):
        x, mean, _ = curves[label]
        name = f"{len(others)} others" if place == 0 else None
        axes.plot(x, mean, color=FAINT, linewidth=0.7, label=name, zorder=1)
    if not any(group.method == "noadapt" for group in main):
        known = _curve(main[0], "correct_noadapt", frames)
        if known is not None:
            axes.plot(*known[:2], color=FAINT, linestyle=":", label="No adaptation")
    for group in main:
        x, mean, sd = curves[group.label]
        look = style[group.label]
        axes.plot(
            x,
            mean,
            color=look.color,
            linestyle=look.dash,
            linewidth=look.width,
            label=group.short,
            zorder=3 if group.method == "moetta" else 2,
            marker=look.marker,
            markersize=4.5,
            markevery=max(1, len(x) // 8),
        )
        if np.isfinite(sd).all() and len(main) <= 3:
            axes.fill_between(x, mean - sd, mean + sd, color=look.color, alpha=0.15, linewidth=0)
    axes.set_xlabel("Images seen")
    axes.set_ylabel("Accuracy in the window, %")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    legend_below(figure, axes)
    x = curves[main[0].label][0]
    window = x[1] - x[0] if len(x) > 1 else x[0]
    ends = ", ".join(f"{g.label} {curves[g.label][1][-1]:.1f} %" for g in main)
    return picture(
        f"stream-{slug(comparison.model, comparison.stream)}",
        "Accuracy over the stream",
        f"Each point is the accuracy in a window of about {window:,.0f} images{_seeds(main)}.",
        f"Lines of accuracy along the stream. In the last window: {ends}.",
        figure,
    )


def _seeds(groups: Sequence[Group]) -> str:
    return ", mean over seeds" if any(len(group.runs) > 1 for group in groups) else ""


def _curve(group: Group, column: str, frames: Frames) -> Curve | None:
    """Images seen, mean accuracy in % and sd over seeds, in windows; None without the steps."""
    rows, images = [], None
    for run in group.runs:
        steps = frames.read(run, "steps")
        if steps is None or column not in steps.columns:
            continue
        steps = steps.sort("step")
        # Where the unadapted model saw only some batches, only those count.
        samples = steps["samples"].to_numpy().astype(float)
        right = steps[column].cast(float).to_numpy().astype(float)
        seen = np.where(np.isfinite(right), samples, 0.0)
        count = int(np.clip(samples.sum() // WINDOW, 6, POINTS))
        if len(samples) < count:
            count = len(samples)
        edges = np.linspace(0, len(samples), count + 1).astype(int)
        total = np.add.reduceat(seen, edges[:-1])
        with np.errstate(invalid="ignore", divide="ignore"):
            rows.append(100 * np.add.reduceat(np.nan_to_num(right), edges[:-1]) / total)
        images = np.cumsum(samples)[edges[1:] - 1]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    if not rows or images is None or not np.isfinite(rows).any():
        return None
    sd = np.std(rows, axis=0, ddof=1) if len(rows) > 1 else np.full(len(rows[0]), np.nan)
    return images, np.mean(rows, axis=0), sd


def pareto(comparison: Comparison) -> Picture | None:
    """Cost against accuracy; a line joins those that nothing beats in both."""
    points = [(g, g.time.mean, g.accuracy) for g in comparison.groups if g.time is not None]
    if not points:
        return None
    figure = canvas(3.7)
    axes = figure.subplots()
    main = chosen([group for group, _, _ in points])
    style = styles(main)
    base = comparison.baseline
    alone = base is not None and not any(group.method == "noadapt" for group, _, _ in points)
    spots = [(x, accuracy.mean) for _, x, accuracy in points]
    named = []
    if alone and base is not None:  # the runs measured it, though it has none of its own
        spots.append((1.0, base.mean))
        named.append(("No adaptation", 1.0, base.mean))
        axes.plot(1.0, base.mean, color=STYLES["noadapt"][0], marker="o", markersize=6.5)
    front: list[tuple[float, float]] = []
    for x, y in sorted(spots, key=lambda spot: (spot[0], -spot[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color=FAINT, linewidth=1.2, zorder=1)
    for group, x, accuracy in points:
        look = style.get(group.label)
        color, marker = (look.color, look.marker) if look else (FAINT, ".")
        axes.errorbar(
            x,
            accuracy.mean,
            yerr=accuracy.sd or None,
            color=color,
            marker=marker,
            markersize=9 if group.method == "moetta" and look else 6.5,
            capsize=2,
            linewidth=1,
            zorder=3 if look else 1,
        )
        if look:
            named.append((group.short, x, accuracy.mean))
    times = [x for _, x, _ in points]
    if max(times) / max(min(times), 1e-9) > 3:
        axes.set_xscale("log")
    low, high = min(*times, 1.0), max(times)
    axes.set_xlim(low / 1.12, max(high * 1.25, low * 1.6))
    ticks = [
        t
        for t in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200)
        if low / 1.1 <= t <= high * 1.25
    ]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(y=0.12)
    axes.set_xlabel("Time (no adaptation = 1)")
    axes.set_ylabel("Accuracy, %")
    _label_points(figure, axes, named)
    told = ", ".join(f"{g.label} {x:.1f} times, {a.mean:.1f} %" for g, x, a in points if g in main)
    others = len(points) - len(main)
    bars = " Bars are the sd over seeds." if any(a.sd is not None for *_, a in points) else ""
    grey = f" The {others} others are grey dots." if others else ""
    return picture(
        f"pareto-{slug(comparison.model, comparison.stream)}",
        "Cost against accuracy",
        f"Up and to the left is better; the line joins what nothing beats in both.{bars}{grey}",
        f"Time against accuracy: {told}.",
        figure,
    )


def _label_points(figure: Any, axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Name points where the name covers no other name or point."""
    figure.draw_without_rendering()  # fixes the layout, so that pixels can be compared
    renderer = figure.canvas.get_renderer()
    spots = [axes.transData.transform((x, y)) for _, x, y in points]
    frame_box = axes.get_window_extent()
    placed: list[Any] = []
    for name, x, y in sorted(points, key=lambda point: -point[2]):
        best, least = None, float("inf")
        for dx, dy, side in (
            (8, 3, "left"), (8, -9, "left"), (-8, 3, "right"), (-8, -9, "right"),
            (0, 9, "center"), (0, -15, "center"), (8, 12, "left"), (8, -18, "left"),
            (-8, 12, "right"), (-8, -18, "right"),
        ):  # fmt: skip
            text = axes.annotate(
                name if len(name) <= 30 else f"{name[:28]}…",
                (x, y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=side,
                fontsize=8,
                color=INK,
            )
            box = text.get_window_extent(renderer).expanded(1.02, 1.05)
            cost = sum(box.overlaps(other) for other in placed) * COVERS
            cost += 6.0 * sum(box.contains(*spot) for spot in spots)
            inside = frame_box.x0 <= box.x0 and box.x1 <= frame_box.x1
            cost += 0 if inside and frame_box.y0 <= box.y0 and box.y1 <= frame_box.y1 else 8.0
            if cost < least:
                if best is not None:
                    best[0].remove()
                best, least = (text, box), cost
            else:
                text.remove()
            if least == 0:
                break
        if best is None:
            continue
        if least >= COVERS:  # better no name than two that nobody can read
            best[0].remove()
        else:
            placed.append(best[1])


def by_domain(comparison: Comparison, frames: Frames, order: Sequence[str] = ()) -> Picture | None:
    """A heat map: what each method gains in each domain; for a single method, its quarters."""
    names = domain_names(comparison)
    if len(names) < 2:
        return None
    groups = [g for g in comparison.in_order(order) if g in chosen(comparison.groups)]
    base = next((g for g in groups if g.method == "noadapt" and g.protocol == 0), None)
    adapted = [group for group in groups if group.method != "noadapt"]
    if base is not None and adapted:
        return _gains(comparison, names, base, adapted)
    return _quarters(comparison, names, groups[0], frames)


def _gains(comparison: Comparison, names: list[str], base: Group, groups: list[Group]) -> Picture:
    values = np.array(
        [
            [_minus(domain_accuracy(g, name), domain_accuracy(base, name)) for g in groups]
            for name in names
        ]
    )
    limit = max(1.0, float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0)
    figure = heat_map(
        values, names, [g.short for g in groups], "Gain, points", "PuOr", (-limit, limit), "+.1f"
    )
    means = ", ".join(f"{g.label} {np.nanmean(values[:, i]):+.1f}" for i, g in enumerate(groups))
    return picture(
        f"gains-{slug(comparison.model, comparison.stream)}",
        "Gain by domain",
        f"Points of accuracy gained over no adaptation in each domain{_seeds(groups)}: "
        "purple gains, orange loses.",
        f"Heat map of gains over no adaptation by domain. Means over domains: {means}.",
        figure,
    )


def _minus(a: float | None, b: float | None) -> float:
    return np.nan if a is None or b is None else a - b


def _quarters(
    comparison: Comparison, names: list[str], group: Group, frames: Frames
) -> Picture | None:
    known = [f for run in group.runs if (f := frames.read(run, "domains")) is not None]
    if not known:
        return None
    values = np.full((len(names), 4), np.nan)
    for row, name in enumerate(names):
        for quarter in range(4):
            hits = [f.filter(domain=name, quarter=quarter) for f in known]
            samples = sum(int(f["samples"].sum()) for f in hits)
            right = sum(int(f["correct"].sum()) for f in hits)
            values[row, quarter] = 100 * right / samples if samples else np.nan
    columns = [f"Quarter {number}" for number in range(1, 5)]
    known_values = values[np.isfinite(values)]
    if not known_values.size:
        return None
    limits = 10 * np.floor(known_values.min() / 10), 10 * np.ceil(known_values.max() / 10)
    figure = heat_map(values, names, columns, "Accuracy, %", "cividis", limits, ".1f")
    return picture(
        f"quarters-{slug(comparison.model, comparison.stream)}",
        "Accuracy by domain and quarter of the stream",
        f"{group.label}: accuracy in each domain, from the first quarter of the stream to the "
        "last.",
        "Heat map of accuracy by domain and quarter of the stream.",
        figure,
    )


def heat_map(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    colors: str,
    limits: tuple[float, float],
    form: str,
) -> Any:
    """A heat map with its numbers in the cells, as long as they fit."""
    tall = 0.21 if len(rows) <= 40 else 0.13
    figure = canvas(1.5 + tall * len(rows), WIDTH)
    axes = figure.subplots()
    mesh = axes.pcolormesh(
        values, cmap=colors, vmin=limits[0], vmax=limits[1], edgecolors="none", rasterized=False
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    names = [name if len(name) <= 24 else f"{name[:22]}…" for name in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=7.5 if tall > 0.2 else 6)
    heads = [name if len(name) <= 22 else f"{name[:20]}…" for name in columns]
    turned = max(map(len, heads)) * len(heads) > 40
    axes.set_xticks(
        np.arange(len(columns)) + 0.5,
        heads,
        rotation=40 if turned else 0,
        ha="left" if turned else "center",
        rotation_mode="anchor" if turned else "default",
        fontsize=8,
    )
    axes.xaxis.tick_top()
    if len(columns) <= 12 and tall > 0.2:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    format(value, form),
                    ha="center",
                    va="center",
                    fontsize=6.8,
                    color="#ffffff" if dark else "#000000",
                    in_layout=False,  # lies in its cell; measuring hundreds takes seconds
                )
    bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=40, pad=0.02, shrink=0.8)
    bar.set_label(label)
    bar.outline.set_visible(False)
    bar.ax.grid(visible=False)
    return figure
