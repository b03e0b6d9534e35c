"""The report's tables and sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetta.paper.beside import published_for
from moetta.report import contents
from moetta.report.headline import headline
from moetta.results import Comparison, Published, Table, compare, load_runs
from report.synthetic_results import (
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


def test_the_papers_results_are_next_to_ours(tmp_path: Path) -> None:
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


def test_cifar_is_compared_with_the_papers_classical(tmp_path: Path) -> None:
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


def test_a_deviating_protocol_is_explained_below_the_table(tmp_path: Path) -> None:
    made = contents.accuracies(only(mixed_runs(tmp_path), allow_mixed=True))
    assert any("Protocol 2 differs in: stream.batch_size (64 / 16)" in note for note in made.notes)
