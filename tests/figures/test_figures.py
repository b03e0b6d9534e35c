"""Drawing: what is written where, and files that do not change from one time to the next."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from moetta import figures
from moetta.figures.draw import _spread


def texts(figure: object) -> list[str]:
    svg = figures.render(figure, "svg").decode()  # type: ignore[arg-type]
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_heat_map_shows_its_numbers_and_leaves_unknown_cells_blank() -> None:
    shown = texts(
        figures.heat_map([[0.25, None], [0.5, 1.0]], ["a", "b"], ["x", "y"], label="cosine")
    )
    assert {"a", "b", "x", "y", "cosine", "0.25", "0.50", "1.00"} <= set(shown)
    assert "nan" not in shown


def test_numbers_are_left_out_where_there_is_no_room() -> None:
    wide = figures.heat_map(np.eye(40), [str(i) for i in range(40)], [f"c{i}" for i in range(40)])
    assert "1.00" not in texts(wide)


def test_a_heat_map_of_nothing_known_is_drawn() -> None:
    assert "a" in texts(figures.heat_map([[None]], ["a"], ["x"]))


def test_leaders_are_named_and_the_rest_is_not() -> None:
    curves = {f"line{i}": ([0.0, 1.0], [0.0, float(i)]) for i in range(20)}
    shown = texts(figures.lines(curves, "x", "y", leaders=["line3", "line7"]))
    assert {"line3", "line7"} <= set(shown)
    assert not {"line0", "line19"} & set(shown)


def test_lines_lead_to_names_and_not_through_them() -> None:
    curves = {f"line{i}": ([0.0, 1.0], [0.0, 0.01 * i]) for i in range(6)}
    figure = figures.lines(curves, "x", "y")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = figure.axes[0].texts
    assert len(texts) == 6
    for text in texts:
        way = text.arrow_patch.get_path().transformed(text.arrow_patch.get_transform())
        start = Text.get_window_extent(text, renderer).x0
        assert way.vertices[:, 0].max() <= start + 1


def test_names_at_the_ends_keep_their_distance_and_order() -> None:
    places = _spread([5.0, 5.0, 5.1, 50.0], 10.0, 0.0, 100.0)
    assert np.all(np.diff(places) >= 10 - 1e-3)
    assert places[3] == pytest.approx(50)
    assert places[0] >= 0


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    def drawn() -> object:
        return figures.heat_maps({"layer": np.eye(3), "other": -np.eye(3)})

    for stem in ("a", "b"):
        figures.save(drawn(), tmp_path / "new" / stem)  # type: ignore[arg-type]
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    for form, start in starts.items():
        first, second = ((tmp_path / "new" / f"{stem}.{form}").read_bytes() for stem in "ab")
        assert first == second
        assert first.startswith(start)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="one of svg, png, pdf, got 'gif'"):
        figures.render(figures.bars([1.0], ["a"], "y", "#000000"), "gif")


def test_points_are_named() -> None:
    places = {"sketch": np.zeros((3, 2)), "photo": np.ones((3, 2))}
    assert {"sketch", "photo"} <= set(texts(figures.points(places)))
