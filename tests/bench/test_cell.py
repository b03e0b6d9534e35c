"""Cells: what their settings come to, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moetta import zoo
from moetta.bench.cell import Cell, resolve_config
from moetta.bench.grid import make_grid
from moetta.core.config import parse_overrides
from moetta.methods import find, list_methods
from moetta.paper.published import PAPER_MODELS

CELL = Cell("moetta", "classical", "digits-vit")
VIT = next(iter(PAPER_MODELS))


def test_shipped_models_start_from_what_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetta.bench.cell.tuned", lambda model, method: {"lr": 0.123})
    name, config = resolve_config(CELL)
    assert (name, config.lr) == ("tuned", 0.123)  # type: ignore[attr-defined]
    name, config = resolve_config(replace(CELL, overrides=(("lr", 0.5),)))
    assert config.lr == 0.5  # type: ignore[attr-defined]
    name, config = resolve_config(replace(CELL, preset="released"))
    assert (name, config.lr) == ("released", 1e-3)  # type: ignore[attr-defined]


def test_paper_models_start_from_the_paper(tmp_path: Path) -> None:
    cell = replace(CELL, model=VIT, data=str(tmp_path))
    name, config = resolve_config(cell)
    assert (name, config.experts, config.balance) == ("paper", 9, 0.2)  # type: ignore[attr-defined]
    for stream in ("potpourri", "potpourri+"):
        name, config = resolve_config(replace(cell, stream=stream))
        assert name == "potpourri"
        assert (config.experts, config.balance) == (11, 0.5)  # type: ignore[attr-defined]


def test_the_seed_is_the_methods_too() -> None:
    assert resolve_config(replace(CELL, seed=7))[1].seed == 7
    assert resolve_config(replace(CELL, seed=7, overrides=(("seed", 3),)))[1].seed == 3


@pytest.mark.parametrize("model", list(zoo.RECIPES))
def test_every_tuned_setting_reaches_its_method(model: str) -> None:
    for method in list_methods():
        name, config = resolve_config(Cell(method, "classical", model, seed=3))
        expected = zoo.tuned(model, method)
        assert name == ("tuned" if expected else "paper")
        assert config == find(method).config.preset("paper", seed=3, **expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "moeta"}, "did you mean 'moetta'"),
        ({"stream": "clasical"}, "did you mean 'classical'"),
        ({"stream": "cifar10-c"}, "needs --data"),
        ({"overrides": (("learning_rate", 1),)}, "no field 'learning_rate'"),
        ({"overrides": (("expert", 1),)}, "did you mean 'experts'"),
        ({"overrides": (("experts", 0),)}, "experts must be"),
        ({"preset": "papier"}, "did you mean 'paper'"),
        ({"preprocess": "papre"}, "did you mean 'paper'"),
        ({"device": "cdua"}, "no device 'cdua'; valid: cpu, cuda, mps"),
        ({"device": "cuda:99"}, "no device 'cuda:99' here"),
    ],
)
def test_wrong_names(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CELL, **change).check()  # type: ignore[arg-type]


def test_missing_paths_get_the_nearest(tmp_path: Path) -> None:
    for name in ("mix.toml", "vit.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"mixture file .*did you mean .*mix\.toml"):
        replace(CELL, stream=str(tmp_path / "mxi.toml")).check()
    with pytest.raises(FileNotFoundError, match=r"weights file .*did you mean .*vit\.safetensors"):
        replace(CELL, weights=str(tmp_path / "vti.safetensors")).check()


def test_missing_data_says_what_to_download_and_where_it_goes() -> None:
    with pytest.raises(FileNotFoundError, match="no data folder nowhere") as caught:
        replace(CELL, stream="potpourri", data="nowhere").check()
    for part in (
        *("imagenet-c", "imagenet-r/n01443537", "imagenet-sketch/", "imagenet-a/", "imagenet-val/"),
        *("github.com/hendrycks/robustness", "image-net.org", "ImageNet-Sketch.zip"),
    ):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"nowhere/cifar-10-batches-py exists$"):
        replace(CELL, stream="cifar10-c", data="nowhere").check()


def test_a_number_is_accepted_for_a_text() -> None:
    config = resolve_config(replace(CELL, overrides=parse_overrides(["frozen=5"])))[1]
    assert config.frozen == "5"  # type: ignore[attr-defined]


def test_overrides() -> None:
    texts = ["lr=1e-3", "experts=11", "select=False", "frozen=0-3", "betas=[0.9, 0.99]", "mgg=none"]
    assert parse_overrides(texts) == (
        ("lr", 1e-3),
        ("experts", 11),
        ("select", False),
        ("frozen", "0-3"),
        ("betas", (0.9, 0.99)),
        ("mgg", None),
    )
    with pytest.raises(ValueError, match="field=value"):
        parse_overrides(["lr"])


def test_a_grid_is_the_product() -> None:
    cells = make_grid(method=["tent", "sar"], seed=[1, 2, 3], stream="classical", model="m")
    assert [(c.method, c.seed) for c in cells] == [
        (m, s) for m in ("tent", "sar") for s in (1, 2, 3)
    ]
    with pytest.raises(ValueError, match="did you mean 'method'"):
        make_grid(methods=["tent"])


def test_a_stream_has_a_limit_or_a_length() -> None:
    with pytest.raises(ValueError, match="--limit or --length, not both"):
        Cell("tent", "classical", "digits-vit", limit=64, length=64).check()
