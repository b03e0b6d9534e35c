"""Runs grouped and compared: over seeds, protocols, models and streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moetta.results import Comparison, compare, load_runs, number
from report.synthetic_results import (
    broken_runs,
    hundred_runs,
    mixed_runs,
    nine_methods,
    write_run,
)


def only(root: Path, **options: bool) -> Comparison:
    runs, _ = load_runs([root])
    (made,) = compare(runs, **options)
    return made


def test_seeds_are_put_together(tmp_path: Path) -> None:
    comparison = only(nine_methods(tmp_path))
    assert len(comparison.groups) == 9
    best = comparison.groups[0]
    assert best.label == "MoETTA"
    scores = [100 * float(run.summary["accuracy"]) for run in best.runs]
    assert best.accuracy.mean == pytest.approx(sum(scores) / 3)
    assert [run.seed for run in best.runs] == [42, 4242, 424242]
    assert comparison.in_order()[0].method == "noadapt"


def test_broken_folders_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    runs, problems = load_runs([broken_runs(tmp_path)])
    assert sorted(run.method for run in runs) == ["deyo", "moetta", "noadapt", "tent"]
    told = {(f.path.name, f.lost) for f in problems}
    assert told == {
        ("bad-card", True),
        ("old-schema", True),
        ("unfinished", True),
    }
    damaged = next(run for run in runs if run.method == "deyo")
    with pytest.raises(ValueError, match=r"steps\.parquet is damaged"):
        damaged.frame("steps")
    assert len(damaged.frame("domains")) > 0


@pytest.mark.parametrize("accuracy", ["66.2", "NaN", "null", '"high"'])
def test_an_impossible_accuracy_is_refused(tmp_path: Path, accuracy: str) -> None:
    summary = write_run(tmp_path) / "summary.json"
    head, tail = summary.read_text().split('"accuracy": ', 1)
    summary.write_text(f'{head}"accuracy": {accuracy},{tail.split(",", 1)[1]}')
    runs, problems = load_runs([tmp_path])
    assert not runs
    assert len(problems) == 1


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    runs, _ = load_runs([tmp_path, folder, tmp_path])
    assert len(runs) == 1


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_runs([tmp_path / "nowhere"])


def test_mixed_protocols_are_refused_by_name_and_marked_when_allowed(tmp_path: Path) -> None:
    runs, _ = load_runs([mixed_runs(tmp_path)])
    with pytest.raises(ValueError, match=r"stream\.batch_size \(64 / 16\)"):
        compare(runs)
    (comparison,) = compare(runs, allow_mixed=True)
    assert [g.label for g in comparison.groups if g.protocol] == ["Tent [protocol 2]"]
    assert "stream.batch_size" in comparison.deviations[0]


def test_other_streams_and_models_are_not_a_mixture(tmp_path: Path) -> None:
    runs, _ = load_runs([hundred_runs(tmp_path)])
    made = compare(runs)
    assert len(made) == 6
    assert sum(len(group.runs) for s in made for group in s.groups) == 102
    labels = [group.label for group in made[-1].groups]
    assert len(set(labels)) == len(labels) == 57


def test_equal_names_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path, "tent", config={"lr": 0.1}, name="a")
    write_run(tmp_path, "tent", config={"lr": 0.2}, name="b")
    assert {g.label for g in only(tmp_path).groups} == {"Tent (lr=0.1)", "Tent (lr=0.2)"}


def test_a_repeated_cell_counts_once_and_the_newest_wins(tmp_path: Path) -> None:
    write_run(tmp_path, name="old", created="2026-01-01T00:00:00+00:00")
    write_run(tmp_path, name="new", created="2026-02-01T00:00:00+00:00")
    runs, repeats = load_runs([tmp_path])
    (comparison,) = compare(runs)
    assert [run.folder.name for run in comparison.groups[0].runs] == ["new"]
    assert [problem.path.name for problem in repeats] == ["old"]


def test_the_unadapted_accuracy_comes_from_the_others_if_it_must(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    comparison = only(tmp_path)
    assert comparison.baseline is not None
    known = number(comparison.groups[0].runs[0], "noadapt_accuracy")
    assert known is not None
    assert comparison.baseline.mean == pytest.approx(100 * known), folder


def test_rows_follow_a_given_order_and_the_rest_by_accuracy(tmp_path: Path) -> None:
    nine_methods(tmp_path, (42,), steps=20)
    write_run(tmp_path, "newcomer", accuracy=0.61, steps=20)
    write_run(tmp_path, "better_newcomer", accuracy=0.9, steps=20)
    order = ("noadapt", "moetta", "tent", "eata", "cotta", "sar", "deyo", "mgtta", "becotta")
    found = [group.method for group in only(tmp_path).in_order(order)]
    assert found == [*order, "better_newcomer", "newcomer"]


def test_a_card_without_a_title_shows_the_methods_name(tmp_path: Path) -> None:
    card = write_run(tmp_path, "tent", steps=20) / "card.json"
    content = json.loads(card.read_text())
    del content["title"]
    card.write_text(json.dumps(content))
    assert [group.label for group in only(tmp_path).groups] == ["tent"]
