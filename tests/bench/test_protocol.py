"""From a cell to what it runs on: what is one run, what is refused, what a card remembers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from moetta.bench import Cell
from moetta.bench.cell_run import run_cell
from moetta.bench.protocol import prepare

CELL = Cell("moetta", "classical", "tiny_models:vit", limit=32, batch_size=16, threads=1)


def named(variant: str, **overrides: object) -> Cell:
    return replace(CELL, variant=variant, overrides=tuple(overrides.items()))


def test_an_override_that_changes_nothing_makes_no_other_run() -> None:
    plain = prepare(CELL)
    same = prepare(named("experts=9,balance=0.2", experts=9, balance=0.2))
    other = prepare(named("experts=3", experts=3))
    assert same.key == plain.key
    assert same.card()["variant"] is None
    assert other.key != plain.key
    assert "experts=3" in other.key
    assert other.card()["variant"] == "experts=3"


def test_a_gpus_run_is_not_a_cpus() -> None:
    made = prepare(CELL)
    assert replace(made, cell=replace(CELL, device="cuda")).key != made.key
    one, two = (replace(made, cell=replace(CELL, device=f"cuda:{i}")).key for i in (0, 1))
    assert one == two


def test_a_card_is_enough_to_run_the_cell_again() -> None:
    cell = replace(named("lr=0.01", lr=0.01), severity=3, seed=7)
    made = prepare(cell)
    card = json.loads(json.dumps(made.card()))
    assert Cell.from_card(card) == cell
    assert prepare(Cell.from_card(card)).key == made.key
    own = replace(cell, stream="photos", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    fields = json.loads(json.dumps(asdict(own)))
    assert Cell.from_card({"cell": fields}) == own
    fields["normalise"] = [fields.pop("mean"), fields.pop("std")]  # as version 0.1 wrote it
    assert Cell.from_card({"cell": fields}) == own


def test_a_model_made_for_other_images_is_refused_by_the_embedded_streams() -> None:
    with pytest.raises(ValueError, match="photo_model: this model was not made for the embedded"):
        prepare(replace(CELL, model="tiny_models:photo_model"))


def test_labels_beyond_the_models_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="knows only 10 classes"):
        list(run_cell(replace(CELL, model="tiny_models:ten_classes"), tmp_path))
    assert not list(tmp_path.glob("*/summary.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": True}, "--mask has no effect"),
        ({"preprocess": "paper"}, "--preprocess has no effect"),
        ({"frost_folder": "frost"}, "--frost-folder has no effect"),
        ({"partial": True}, "--partial has no effect"),
        ({"size": 64}, "--size has no effect"),
        ({"on_error": "skip"}, "--on-error skip has no effect"),
        ({"mean": (0.5,) * 3, "std": (0.5,) * 3}, "--mean has no effect"),
        ({"on_error": "ignore"}, "on_error must be 'fail' or 'skip'"),
    ],
)
def test_options_without_effect_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(replace(CELL, **changes))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six pictures of two classes, the second of them damaged."""
    generator = torch.Generator().manual_seed(0)
    for i in range(6):
        place = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place)
    (tmp_path / "photos" / "b" / "1.png").write_bytes(b"not a picture")
    return tmp_path / "photos"


def test_severity_is_not_a_folders(photos: Path) -> None:
    with pytest.raises(ValueError, match="--severity has no effect"):
        prepare(replace(CELL, stream=str(photos), severity=3))


def test_unreadable_images_end_a_run_or_are_listed(photos: Path, tmp_path: Path) -> None:
    cell = replace(
        CELL, stream=str(photos), limit=None, batch_size=2, model="tiny_models:photo_model"
    )
    with pytest.raises(OSError, match=r"1\.png"):
        list(run_cell(cell, tmp_path / "fail"))
    cell = replace(cell, on_error="skip")
    for stop in (1, 2):  # stopped and taken up again: what an earlier session skipped is not lost
        work = run_cell(cell, tmp_path / "skip", checkpoint_seconds=0)
        for _ in range(stop):
            next(work)
        work.close()
    list(run_cell(cell, tmp_path / "skip"))
    (summary,) = (tmp_path / "skip").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert found["samples"] == 5
    (skipped,) = found["unread"]
    assert "1.png" in skipped["reason"]
