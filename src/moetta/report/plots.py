"""The figures of accuracy and cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moetta.figures import FAINT, Curve, canvas, draw_lines, heat_map, label_points
from moetta.figures.draw import count_axis, label_room
from moetta.report.contents import domain_accuracy, domain_names
from moetta.report.frames import Frames
from moetta.report.pictures import QUIET, Picture, Style, leaders, styles, themed
from moetta.results import BASELINE, Comparison, Group, slug
from moetta.results.courses import Along, Course, courses, has_gain

NAMED = 10  # lines that have room for a name at their end
COLUMNS = 12  # groups in a heat map


def over_stream(comparison: Comparison, frames: Frames) -> Picture | None:
    """Gain over the source model along the stream; the accuracy itself as the other view."""
    found = courses(comparison, lambda run: frames.read(run, "steps"))
    groups = [group for group in comparison.groups if group.label in found]
    if not groups:
        return None
    style = styles(leaders(groups))
    absolute = _absolute(comparison, groups, found, style)
    gaining = [group for group in groups if has_gain(group, found[group.label])]
    return _gains_along(comparison, gaining, found, style, absolute) if gaining else absolute


def _curves(
    groups: Sequence[Group],
    found: Mapping[str, Course],
    style: Mapping[str, Style],
    pick: Callable[[Along], np.ndarray],
) -> list[Curve]:
    everyone = len(groups) <= NAMED
    made = []
    for group in groups:
        course, drawn = found[group.label], style.get(group.label, QUIET)
        sd = None if course.sd is None or drawn is QUIET else pick(course.sd)
        label = group.short if everyone or drawn is not QUIET else ""
        made.append(
            Curve(
                label, course.mean.images, pick(course.mean), sd, drawn.color, drawn.marker,
                drawn.dash, 2.2 if group is groups[0] else 1.3,
            )
        )  # fmt: skip
    return made


def _gains_along(
    comparison: Comparison,
    groups: Sequence[Group],
    found: Mapping[str, Course],
    style: Mapping[str, Style],
    other: Picture,
) -> Picture:
    so_far = _curves(groups, found, style, lambda along: along.so_far)
    window = _curves(groups, found, style, lambda along: along.gain)
    room = label_room([curve.label for curve in so_far] + ["No adaptation"])
    figure = canvas(5.2, right=room)
    figure.subplots_adjust(hspace=0.22)
    top, low = figure.subplots(2, 1, sharex=True)
    lost: set[str] = set()
    for axes, curves, label in (
        (top, so_far, "Gain so far, points"),
        (low, window, "Gain in the window, points"),
    ):
        images = found[groups[0].label].mean.images
        zero = Curve("No adaptation", images, np.zeros(len(images)), color=FAINT)
        axes.set_ylabel(label)
        shown, beyond = _in_reach(axes, curves, zero)
        lost |= {groups[place].label for place in beyond}
        draw_lines(axes, [zero, *shown])
    count_axis(low, "Images seen")
    size = _window(found[groups[0].label])
    ends = ", ".join(
        f"{g.label} {found[g.label].mean.so_far[-1]:+.2f}" for g in groups if g.label in style
    )
    spread = " Bands show the standard deviation over seeds." if _several(groups) else ""
    return Picture(
        f"stream-{slug(comparison.model, comparison.stream)}",
        "Gain over the stream",
        "Points of accuracy above no adaptation on the same batches: over all images so far "
        f"(above), and in windows of about {size:,.0f} images (below).{spread}"
        f"{_grey(groups, style)}{_beyond(groups, lost)}",
        f"Lines of gain along the stream. Over the whole stream, in points: {ends}.",
        figure,
        themed(style.values()),
        other,
    )


def _absolute(
    comparison: Comparison,
    groups: Sequence[Group],
    found: Mapping[str, Course],
    style: Mapping[str, Style],
) -> Picture:
    curves = _curves(groups, found, style, lambda along: along.accuracy)
    figure = canvas(3.1, right=label_room([curve.label for curve in curves]))
    axes = figure.subplots()
    axes.set_ylabel("Accuracy in the window, %")
    curves, beyond = _in_reach(axes, curves)
    draw_lines(axes, curves)
    count_axis(axes, "Images seen")
    size = _window(found[groups[0].label])
    spread = ", mean and standard deviation over seeds" if _several(groups) else ""
    ends = ", ".join(
        f"{g.label} {found[g.label].mean.accuracy[-1]:.1f} %" for g in groups if g.label in style
    )
    return Picture(
        f"accuracy-along-{slug(comparison.model, comparison.stream)}",
        "Accuracy over the stream",
        f"Each point is the accuracy in a window of about {size:,.0f} images{spread}."
        f"{_grey(groups, style)}{_beyond(groups, {groups[place].label for place in beyond})}",
        f"Lines of accuracy along the stream. In the last window: {ends}.",
        figure,
        themed(style.values()),
    )


def _in_reach(
    axes: Any, curves: Sequence[Curve], zero: Curve | None = None
) -> tuple[list[Curve], list[int]]:
    """Let the coloured lines decide the scale, so that one that fails does not flatten them.

    Returns:
        The lines, without the names of those that end beyond the scale; and which lines leave it.
    """
    loud = [np.asarray(curve.y) for curve in curves if not curve.quiet]
    main = np.concatenate([*loud, *([] if zero is None else [np.asarray(zero.y)])])
    every = np.concatenate([main, *(np.asarray(curve.y) for curve in curves)])
    reach = _reach(main[np.isfinite(main)], every[np.isfinite(every)])
    if reach is None:
        return list(curves), []
    low, high = reach
    pad = 0.05 * (high - low)
    axes.set_ylim(low - pad, high + pad)
    shown, beyond = [], []
    for place, curve in enumerate(curves):
        y = np.asarray(curve.y)[np.isfinite(curve.y)]
        gone = bool(y.size) and not low <= y[-1] <= high
        if bool(((y < low) | (y > high)).any()):
            beyond.append(place)
        shown.append(replace(curve, label="") if gone else curve)
    return shown, beyond


def _reach(main: np.ndarray, every: np.ndarray) -> tuple[float, float] | None:
    """The range to show, at most three times that of the main values; None if all fit."""
    if not main.size:
        return None
    span = max(float(np.ptp(main)), 1.0)
    low, high = float(main.min()) - span, float(main.max()) + span
    if low <= every.min() and every.max() <= high:
        return None
    inside = every[(every >= low) & (every <= high)]
    return float(inside.min()), float(inside.max())


def _beyond(groups: Sequence[Group], lost: Collection[str]) -> str:
    """Which groups leave the plot."""
    names = [group.label for group in groups if group.label in lost]
    if not names:
        return ""
    told = ", ".join(names) if len(names) <= 3 else f"{len(names)} of them"
    return f" The scale follows the coloured lines; {told} leave{'s' * (len(names) == 1)} it."


def _window(course: Course) -> float:
    images = course.mean.images
    return float(images[1] - images[0]) if len(images) > 1 else float(images[0])


def _several(groups: Sequence[Group]) -> bool:
    return any(len(group.runs) > 1 for group in groups)


def _grey(groups: Sequence[Group], style: Mapping[str, Style]) -> str:
    quiet = sum(group.label not in style for group in groups)
    lowest = groups[-1]
    told = f"; the lowest is {lowest.label}" if lowest.label not in style else ""
    return f" The other {quiet} are grey{told}." if quiet > 1 else ""


def pareto(comparison: Comparison) -> Picture | None:
    """Cost against accuracy; a line joins the groups that no other beats in both."""
    points = [(g, g.time.mean, g.accuracy) for g in comparison.groups if g.time is not None]
    if not points:
        return None
    figure = canvas(3.5)
    axes = figure.subplots()
    main = leaders([group for group, _, _ in points])
    style = styles(main)
    base = comparison.baseline
    reach = _reach(
        np.array([a.mean for g, _, a in points if g in main]),
        np.array([a.mean for *_, a in points]),
    )
    floor = -np.inf if reach is None else reach[0] - 0.15 * (reach[1] - reach[0])
    spots = [(x, max(accuracy.mean, floor)) for _, x, accuracy in points]
    named = []
    if base is not None and not any(group.method == BASELINE for group, _, _ in points):
        # It has no runs here, but the others measured it.
        spots.append((1.0, base.mean))
        named.append(("No adaptation", 1.0, base.mean))
        axes.plot(1.0, base.mean, color=FAINT, marker="o", markersize=6)
    front: list[tuple[float, float]] = []
    for x, y in sorted(spots, key=lambda spot: (spot[0], -spot[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    steps = [front[0]]
    for x, y in front[1:]:
        steps += [(x, steps[-1][1]), (x, y)]
    if len(front) > 1:
        axes.plot(*zip(*steps, strict=True), color=FAINT, linewidth=1.2, zorder=1)
    for group, x, accuracy in points:
        drawn, under = style.get(group.label, QUIET), accuracy.mean < floor
        axes.errorbar(
            x,
            max(accuracy.mean, floor),
            yerr=None if under else accuracy.sd or None,
            color=drawn.color,
            marker="v" if under else drawn.marker or ".",
            markersize=6.5,
            capsize=2,
            linewidth=1,
            zorder=1 if drawn is QUIET else 3,
        )
    # The leaders choose their places first; the others are named while there is room.
    by_rank = [p for p in points if p[0] in main] + [p for p in points if p[0] not in main]
    named += [
        (g.short, x, a.mean) if a.mean >= floor else (f"{g.short}, {a.mean:.1f}", x, floor)
        for g, x, a in by_rank
    ]
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
    axes.autoscale_view(scalex=False)
    colors = {group.short: style[group.label].color for group in main}
    label_points(axes, named, colors, steps)
    told = ", ".join(f"{g.label} {x:.1f} times, {a.mean:.1f} %" for g, x, a in points if g in main)
    sd = " Bars show the standard deviation over seeds." if _several(comparison.groups) else ""
    return Picture(
        f"pareto-{slug(comparison.model, comparison.stream)}",
        "Cost against accuracy",
        "Up and to the left is better; the line joins the methods that no other beats in both."
        f"{sd}{_grey([group for group, _, _ in points], style)}"
        f"{' A triangle at the bottom is a method far below.' if np.isfinite(floor) else ''}",
        f"Time against accuracy: {told}.",
        figure,
        themed(style.values()),
    )


def by_domain(comparison: Comparison, frames: Frames, order: Sequence[str] = ()) -> Picture | None:
    """A heat map: what each method gains in each domain; for a single method, its quarters."""
    names = domain_names(comparison)
    if len(names) < 2:
        return None
    main = leaders(comparison.groups, COLUMNS)
    groups = [group for group in comparison.in_order(order) if group in main]
    base = comparison.unadapted
    adapted = [group for group in groups if group.method != BASELINE]
    if base is not None and adapted:
        return _gains(comparison, names, base, adapted, len(comparison.groups) - len(groups))
    return _quarters(comparison, names, groups[0], frames)


def _gains(
    comparison: Comparison, names: list[str], base: Group, groups: list[Group], more: int
) -> Picture:
    values = np.array(
        [
            [_minus(domain_accuracy(g, name), domain_accuracy(base, name)) for g in groups]
            for name in names
        ]
    )
    limit = max(1.0, float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0)
    figure = heat_map(
        values,
        names,
        [group.short for group in groups],
        label="Gain, points",
        colors="PuOr",
        limits=(-limit, limit),
        form="+.1f",
    )
    means = ", ".join(f"{g.label} {np.nanmean(values[:, i]):+.1f}" for i, g in enumerate(groups))
    rest = f" The table below has the other {more} too." if more else ""
    return Picture(
        f"gains-{slug(comparison.model, comparison.stream)}",
        "Gain by domain",
        "Points of accuracy above no adaptation in each domain"
        f"{', mean over seeds' if _several(groups) else ''}: purple is above, orange below."
        f"{rest}",
        f"Heat map of gains over no adaptation by domain. Means over domains: {means}.",
        figure,
    )


def _minus(a: float | None, b: float | None) -> float:
    return np.nan if a is None or b is None else a - b


def _quarters(
    comparison: Comparison, names: list[str], group: Group, frames: Frames
) -> Picture | None:
    known = [f for run in group.runs if (f := frames.read(run, "domains")) is not None]
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
    figure = heat_map(values, names, columns, label="Accuracy, %", limits=limits, form=".1f")
    return Picture(
        f"quarters-{slug(comparison.model, comparison.stream)}",
        "Accuracy by domain and quarter of the stream",
        f"{group.label}: accuracy in each domain, from the first quarter of the stream to the "
        "last.",
        "Heat map of accuracy by domain and quarter of the stream.",
        figure,
    )
