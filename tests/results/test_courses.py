"""What a gain along the stream is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from moetta.results import Comparison, compare, load_runs
from moetta.results.courses import best_stop, courses
from report.synthetic_results import write_run


def compared(root: Path) -> list[Comparison]:
    runs, _ = load_runs([root])
    return compare(runs)


def rewritten(folder: Path, **columns: pl.Series | None) -> None:
    path = folder / "steps.parquet"
    frame = pl.read_parquet(path)
    for name, values in columns.items():
        frame = frame.drop(name) if values is None else frame.with_columns(values.alias(name))
    frame.write_parquet(path)


def test_gain_is_taken_on_the_batches_that_both_have_seen(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "tent", steps=8, batch_size=10)
    right = pl.Series([5, 6, 7, 8, 9, 9, 9, 9])
    theirs = pl.Series([5, None, 5, None, 5, None, 5, None], dtype=pl.Int64)
    rewritten(folder, correct=right, correct_noadapt=theirs)
    (comparison,) = compared(tmp_path)
    course = courses(comparison)["Tent"]
    assert course.sd is None
    assert course.mean.images[-1] == 80
    # Batches 0, 2, 4 and 6: 0, 2, 4 and 4 more right answers of 40.
    assert course.mean.so_far[-1] == pytest.approx(100 * 10 / 40)
    assert course.mean.accuracy[-1] == pytest.approx(90)


def test_gain_comes_from_the_source_models_own_run_where_the_steps_lack_it(tmp_path: Path) -> None:
    adapted = write_run(tmp_path, "tent", steps=8, batch_size=10)
    alone = write_run(tmp_path, "noadapt", steps=8, batch_size=10)
    rewritten(adapted, correct=pl.Series([6] * 8), correct_noadapt=None)
    rewritten(alone, correct=pl.Series([4] * 8))
    (comparison,) = compared(tmp_path)
    found = courses(comparison)
    assert np.allclose(found["Tent"].mean.gain, 20)
    assert np.allclose(found["No adaptation"].mean.gain, 0)


def test_seeds_give_a_mean_and_a_spread(tmp_path: Path) -> None:
    for seed, right in ((1, 6), (2, 8)):
        folder = write_run(tmp_path, "tent", seed, steps=8, batch_size=10)
        rewritten(folder, correct=pl.Series([right] * 8), correct_noadapt=pl.Series([5] * 8))
    (comparison,) = compared(tmp_path)
    course = courses(comparison)["Tent"]
    assert np.allclose(course.mean.gain, 20)
    assert course.sd is not None
    assert np.allclose(course.sd.gain, 200**0.5)


def test_the_best_stop_is_where_most_answers_were_won(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "tent", steps=8, batch_size=10)
    right = pl.Series([5, 7, 7, 6, 4, 3, 3, 3])
    rewritten(folder, correct=right, correct_noadapt=pl.Series([5] * 8))
    (comparison,) = compared(tmp_path)
    along = courses(comparison)["Tent"].mean
    # Windows hold one or two batches, and every edge is a multiple of 10 images.
    assert best_stop(along) == 40
    assert along.so_far[-1] == pytest.approx(100 * -2 / 80)


def test_a_run_that_never_gains_should_not_have_started(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "tent", steps=8, batch_size=10)
    rewritten(folder, correct=pl.Series([4] * 8), correct_noadapt=pl.Series([5] * 8))
    (comparison,) = compared(tmp_path)
    assert best_stop(courses(comparison)["Tent"].mean) == 0
