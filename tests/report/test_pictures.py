"""Who is drawn in colour, how, and what a gain along the stream is."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from moetta.figures.theme import DARK_PAPER, FAINT, LIGHT_PAPER, contrast, difference
from moetta.report.frames import Frames
from moetta.report.pictures import inline_svg, leaders, styles
from moetta.report.plots import by_domain, over_stream, pareto
from moetta.results import Comparison, compare, load_runs
from report.synthetic_results import hundred_runs, nine_methods, write_run


def compared(root: Path) -> list[Comparison]:
    runs, _ = load_runs([root])
    return compare(runs)


def test_leaders_are_the_best_the_source_model_and_methods_before_variants(tmp_path: Path) -> None:
    *_, many = compared(hundred_runs(tmp_path))
    assert len(many.groups) == 57
    found = leaders(many.groups)
    assert [(g.method, bool(g.variant)) for g in found if g.variant] == []
    assert {"noadapt", "moetta", "mgtta"} <= {g.method for g in found}
    assert len(found) == 6
    assert found[0] is many.groups[0]


def restyled(root: Path, method: str, drawn: object) -> None:
    card = write_run(root, method, steps=20) / "card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "drawn": drawn}))


def test_a_method_is_drawn_as_its_card_says_and_others_from_the_palette(tmp_path: Path) -> None:
    restyled(tmp_path, "tent", {"color": "#ffe119", "marker": "h"})  # too pale for white paper
    restyled(tmp_path, "eata", {"light": "#0e7c5b", "dark": "#3ecf9c", "marker": "^", "dash": "--"})
    restyled(tmp_path, "sar", {"color": "no colour"})
    restyled(tmp_path, "deyo", None)
    (comparison,) = compared(tmp_path)
    found = styles(comparison.groups)
    assert found["Tent"].marker == "h"
    assert (found["EATA"].color, found["EATA"].dark) == ("#0e7c5b", "#3ecf9c")
    assert found["EATA"].dash == "--"
    assert len({style.color for style in found.values()}) == 4
    for style in found.values():
        assert contrast(style.color, LIGHT_PAPER) >= 3
        assert contrast(style.dark, DARK_PAPER) >= 3


def test_with_more_groups_than_colours_the_rest_is_grey(tmp_path: Path) -> None:
    for number in range(12):
        write_run(tmp_path, f"m{number}", steps=20)
    (comparison,) = compared(tmp_path)
    colors = [style.color for style in styles(comparison.groups).values()]
    assert colors.count(FAINT) == 4
    picture = over_stream(comparison, Frames())
    assert picture is not None
    lowest = comparison.groups[-1].label
    assert f"The other 6 are grey; the lowest is {lowest}." in picture.caption
    named = picture.svg.decode()
    leading = [group.label for group in leaders(comparison.groups)]
    for group in comparison.groups:
        assert (f">{group.label}<" in named) == (group.label in leading)


def test_the_accuracy_itself_is_the_other_view(tmp_path: Path) -> None:
    (comparison,) = compared(nine_methods(tmp_path, (42,), steps=40))
    picture = over_stream(comparison, Frames())
    assert picture is not None
    assert picture.title == "Gain over the stream"
    assert picture.other is not None
    assert picture.other.title == "Accuracy over the stream"
    assert "MoETTA +" in picture.alt


def twenty_methods(root: Path) -> Comparison:
    write_run(root, "noadapt", steps=20)
    for number in range(19):
        write_run(root, f"method{number}", accuracy=0.5 + number / 100, steps=20)
    (comparison,) = compared(root)
    return comparison


def test_names_of_twenty_methods_cover_neither_each_other_nor_the_line(tmp_path: Path) -> None:
    picture = pareto(twenty_methods(tmp_path))
    assert picture is not None
    (axes,) = picture.figure.axes
    renderer = FigureCanvasAgg(picture.figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) >= 15  # at the same cost, not all fit
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    line = axes.lines[0].get_xydata()
    corners = axes.transData.transform(line)
    for a, b in pairwise(corners):
        piece = Bbox([np.minimum(a, b), np.maximum(a, b) + 1e-6])
        assert not any(box.overlaps(piece) for box in boxes)


def test_a_method_that_fails_does_not_flatten_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "broken", accuracy=0.2, steps=20)
    comparison = twenty_methods(tmp_path)
    assert comparison.groups[-1].label == "broken"
    picture = over_stream(comparison, Frames())
    assert picture is not None
    assert "The scale follows the coloured lines; broken leaves it." in picture.caption
    for axes in picture.figure.axes:
        low, high = axes.get_ylim()
        loud = [line.get_ydata() for line in axes.lines if line.get_color() != FAINT]
        assert high - low <= 3.5 * np.ptp(np.concatenate(loud))
    costs = pareto(comparison)
    assert costs is not None
    assert "A triangle at the bottom is a method far below." in costs.caption
    names = [text.get_text() for text in costs.figure.axes[0].texts]
    assert f"broken, {comparison.groups[-1].accuracy.mean:.1f}" in names
    low, _ = costs.figure.axes[0].get_ylim()
    assert low > comparison.groups[-1].accuracy.mean


def test_colours_that_look_alike_are_not_used_together(tmp_path: Path) -> None:
    restyled(tmp_path, "tent", {"light": "#c2560c"})
    restyled(tmp_path, "eata", {"light": "#b45309"})
    (comparison,) = compared(tmp_path)
    one, other = (style.color for style in styles(comparison.groups).values())
    assert difference(one, other) >= 20
    assert "#c2560c" in {one, other} or "#b45309" in {one, other}


def test_the_heat_map_says_how_many_methods_it_leaves_to_the_table(tmp_path: Path) -> None:
    picture = by_domain(twenty_methods(tmp_path), Frames())
    assert picture is not None
    assert "The table below has the other" in picture.caption


def test_inline_svg_follows_the_theme(tmp_path: Path) -> None:
    (comparison,) = compared(nine_methods(tmp_path, (42,), steps=20))
    picture = pareto(comparison)
    assert picture is not None
    text = inline_svg(picture)
    assert "light-dark(#0b5cad, " in text
    assert "currentColor" in text
    assert text.count("<title") == 1
