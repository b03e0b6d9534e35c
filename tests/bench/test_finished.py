"""A finished run is recognised by its card, without its data and weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_models import vit

from moetta import zoo
from moetta.bench import Cell, run_grid
from moetta.bench.finished import find_finished
from moetta.commands.main import main
from moetta.results.runs import load_run
from moetta.zoo.by_name import forget_models

CELL = Cell("tent", "classical", "tiny_models:vit", limit=32, batch_size=16, threads=1)


def finish(cell: Cell, root: Path) -> Path:
    (outcome,) = run_grid([cell], root)
    assert outcome.folder is not None, outcome.error
    return outcome.folder


def forget_hash(folder: Path) -> None:
    """Make a card look like those of version 0.1."""
    path = folder / "card.json"
    card = json.loads(path.read_text())
    del card["weights_file_sha256"], card["title"], card["drawn"]
    mean, std = card["cell"].pop("mean"), card["cell"].pop("std")
    card["cell"]["normalise"] = None if mean is None else [mean, std]
    path.write_text(json.dumps(card))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images of two classes."""
    generator = torch.Generator().manual_seed(0)
    for i in range(8):
        place = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place)
    return tmp_path / "photos"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(vit().state_dict(), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, building a model fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("moetta.bench.protocol.load_model", refuse)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_with_data_and_weights_gone(
    old: bool,
    workers: str,
    photos: Path,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["run", "--model", "tiny_models:vit", "--weights", str(weights), "--threads", "1"]
    command += ["--stream", str(photos), "--size", "32", "--batch-size", "4"]
    command += ["--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"]
    command += ["--method", "noadapt", "tent", "cotta", "--out", str(tmp_path / "runs")]
    page = ["--report", str(tmp_path / "page.html")]
    assert main(command) == 0
    table = capsys.readouterr().out.partition("method")[2]
    assert "tent" in table
    written = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/summary.json")}
    assert len(written) == 3
    if old:
        for summary in written:
            forget_hash(summary.parent)
    shutil.rmtree(photos)
    weights.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("moetta.bench.protocol.load_model", refuse)
    monkeypatch.setattr("moetta.bench.protocol.make_stream", refuse)
    monkeypatch.setattr("moetta.bench.backends.Processes._hire", refuse)
    assert main([*command, *page, "--workers", workers]) == 0
    assert capsys.readouterr().out.partition("method")[2].startswith(table)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/summary.json")} == written
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("no_models")
def test_a_missing_data_folder_fails_a_cell_that_has_to_be_run(tmp_path: Path) -> None:
    cell = Cell("tent", "classical", "digits-vit", data=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no data folder"):
        run_grid([cell], tmp_path)


def test_other_weights_make_another_run(photos: Path, weights: Path, tmp_path: Path) -> None:
    cell = replace(
        CELL,
        stream=str(photos),
        weights=str(weights),
        limit=None,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        size=32,
    )
    first = finish(cell, tmp_path)
    assert load_run(first).card["weights_file_sha256"]
    assert finish(cell, tmp_path) == first
    save_file({k: v + 0.01 for k, v in vit().state_dict().items()}, weights)
    assert find_finished(cell, tmp_path) is None
    second = finish(cell, tmp_path)
    assert second != first
    weights.unlink()  # now both fit
    assert finish(cell, tmp_path) in (first, second)


def test_more_of_the_users_own_images_make_another_run(photos: Path, tmp_path: Path) -> None:
    model = "tiny_models:photo_model"
    cell = replace(CELL, stream=str(photos), limit=None, model=model)
    first = finish(cell, tmp_path)
    shutil.copy(photos / "a" / "0.png", photos / "a" / "8.png")
    second = finish(cell, tmp_path)
    assert load_run(second).summary["samples"] == 9
    assert second != first


def test_another_function_of_the_same_name_makes_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(CELL, tmp_path)
    assert finish(CELL, tmp_path) == first
    forget_models()
    other = vit()
    other.head.bias.data += 1  # type: ignore[union-attr, operator]
    monkeypatch.setattr("tiny_models.vit", lambda: other)
    assert finish(CELL, tmp_path) != first
    forget_models()


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 2},
        {"loaders": 1},
        {"experiment": "table1"},
        {"preset": "paper"},
        {"variant": "lr=0.1", "overrides": (("lr", 0.1),)},
        {"order": "mixed"},
    ],
)
def test_what_changes_nothing_is_the_same_run(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetta.bench.cell.tuned", lambda model, method: {})
    cell = replace(CELL, model="digits-vit", overrides=(("lr", 1e-1),), variant="lr=1e-1")
    cell = cell if "overrides" in change else replace(cell, overrides=(), variant=None)
    folder = finish(cell, tmp_path)
    found = find_finished(replace(cell, **change), tmp_path)  # type: ignore[arg-type]
    assert found is not None
    assert (found.folder, found.certain) == (folder, True)


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 31},
        {"batch_size": 8},
        {"severity": 3},
        {"order": "continual"},
        {"seed": 1},
        {"source_images": 10},
        {"overrides": (("lr", 0.1),)},
        {"data": "somewhere"},
        {"device": "cuda"},
        {"method": "noadapt"},
    ],
)
def test_what_changes_something_is_another_run(change: dict[str, object], tmp_path: Path) -> None:
    cell = replace(CELL, model="digits-vit")
    finish(cell, tmp_path)
    assert find_finished(cell, tmp_path) is not None
    assert find_finished(replace(cell, **change), tmp_path) is None  # type: ignore[arg-type]


def test_new_tuned_settings_make_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, model="digits-vit")
    finish(cell, tmp_path)
    monkeypatch.setattr("moetta.bench.cell.tuned", lambda model, method: {"lr": 0.123})
    assert find_finished(cell, tmp_path) is None


def test_a_shipped_model_with_new_weights_makes_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, model="digits-vit")
    folder = finish(cell, tmp_path)
    forget_hash(folder)  # an old card cannot tell; the weights themselves can
    found = find_finished(cell, tmp_path)
    assert found is not None
    assert not found.certain
    assert finish(cell, tmp_path) == folder
    shutil.rmtree(folder)
    finish(cell, tmp_path)
    card = zoo.card("digits-vit")
    monkeypatch.setattr(zoo, "card", lambda name: {**card, "sha256": "0" * 64})
    assert find_finished(cell, tmp_path) is None


@pytest.mark.usefixtures("no_models")
def test_an_unfinished_run_is_not_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "digits-vit__classical__tent__s42__00000000"
    folder.mkdir()
    assert find_finished(replace(CELL, model="digits-vit"), tmp_path) is None
    (folder / "summary.json").write_text("{")
    assert find_finished(replace(CELL, model="digits-vit"), tmp_path) is None
