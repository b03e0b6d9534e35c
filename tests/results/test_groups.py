from __future__ import annotations

from pathlib import Path

import pytest

from moetta.paper.beside import published_for
from moetta.report import contents
from moetta.report.figures import chosen
from moetta.report.headline import headline
from moetta.results import Comparison, Published, Table, compare, load_runs, number
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


def printed(root: Path) -> Published:
    runs, _ = load_runs([root])
    (found,) = published_for(runs).values()
    return found


def accuracy_table(root: Path) -> Table:
    return contents.accuracies(only(root), printed(root))


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
    notes = contents.accuracies(comparison).notes
    assert any("Protocol 2" in note for note in notes)


def test_other_streams_and_models_are_no_mixture(tmp_path: Path) -> None:
    runs, _ = load_runs([hundred_runs(tmp_path)])
    made = compare(runs)
    assert len(made) == 6
    assert sum(len(group.runs) for s in made for group in s.groups) == 102
    drawn = chosen(made[-1].groups)
    assert len(drawn) == 9
    assert drawn[0] is made[-1].groups[0]
    assert {"noadapt", "moetta", "tent"} <= {g.method for g in drawn if not g.variant}
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


def test_the_papers_figures_stand_beside_ours(tmp_path: Path) -> None:
    made = accuracy_table(nine_methods(tmp_path, (42,)))
    place = {column.title: i for i, column in enumerate(made.columns)}
    row = next(row for row in made.rows if row[0].value == "MoETTA")
    assert row[place["Paper"]].value == 66.15
    assert row[place["Paper"]].sd == 0.06
    ours = row[place["Accuracy"]].value
    assert isinstance(ours, float)
    assert row[place["Difference"]].value == pytest.approx(ours - 66.15)
    assert row[place["Paper's gain"]].value == pytest.approx(66.15 - 55.92)
    (note,) = made.notes
    assert note.startswith(
        "Not the paper's model and data: its figures for potpourri+ are for ViT-B"
    )
    assert "ImageNet (888,389 images), ours for digits-vit on embedded-potpourri+ (7,680" in note


def test_cifar_stands_beside_the_papers_classical(tmp_path: Path) -> None:
    write_run(tmp_path, "tent", stream="cifar10-c", model="cifar-convnext")
    made = accuracy_table(tmp_path)
    place = {column.title: i for i, column in enumerate(made.columns)}
    assert made.rows[0][place["Paper"]].value == 58.88
    assert "ours for cifar-convnext on cifar10-c (7,680 images)" in made.notes[0]


def test_other_streams_have_no_figures_of_the_papers(tmp_path: Path) -> None:
    write_run(tmp_path, stream="pets")
    made = accuracy_table(tmp_path)
    assert "Paper" not in [column.title for column in made.columns]
    assert made.notes == ()


def test_an_ablation_has_its_own_figure_in_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path, variant="no_load_balancing", accuracy=0.2)
    made = accuracy_table(tmp_path)
    place = {column.title: i for i, column in enumerate(made.columns)}
    assert made.rows[0][place["Paper"]].value == 21.29


def test_headline_names_winner_lead_and_cost(tmp_path: Path) -> None:
    text = headline(only(nine_methods(tmp_path))).replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith("On embedded-potpourri+ with digits-vit, MoETTA is the most accurate:")
    assert "times the time of no adaptation" in text
    assert "It leads MGTTA" in text


def test_headline_is_honest_when_another_wins_or_it_is_close(tmp_path: Path) -> None:
    for seed, tent, moetta in ((1, 0.70, 0.60), (2, 0.64, 0.70), (3, 0.67, 0.65)):
        write_run(tmp_path, "tent", seed, accuracy=tent)
        write_run(tmp_path, "moetta", seed, accuracy=moetta)
    text = headline(only(tmp_path), "moetta")
    assert "Tent is the most accurate" in text
    assert "too close to call" in text
    assert "MoETTA is number 2 of 2" in text


def test_headline_when_nothing_helps_and_runs_collapse(tmp_path: Path) -> None:
    write_run(tmp_path, "noadapt")
    write_run(tmp_path, "tent", accuracy=0.1)
    text = headline(only(tmp_path))
    assert "Tent does not beat leaving the model alone" in text
    assert "Collapsed runs (below half of no adaptation): Tent in 1 of 1" in text


def test_headline_of_the_unadapted_model_alone(tmp_path: Path) -> None:
    write_run(tmp_path, "noadapt")
    assert "the source model without adaptation reaches" in headline(only(tmp_path))
