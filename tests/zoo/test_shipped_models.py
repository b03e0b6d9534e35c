"""The shipped weights are what their recipes describe."""

import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as from_bytes

from moetta import zoo
from moetta.data import cifar10, embedded
from moetta.data.preprocess import own_preprocess
from moetta.zoo.train_and_measure import training_batches
from moetta.zoo.trainer import Trainer, normalise

WEIGHTS = files("moetta.zoo").joinpath("weights")
NAMES = zoo.available()
DIGITS = [n for n in NAMES if zoo.recipe(n).data == "digits"]
PHOTOS = [n for n in NAMES if zoo.recipe(n).data == "cifar10"]


@pytest.fixture(scope="module")
def photos() -> Path:
    folder = os.environ.get("MOETTA_CIFAR10")
    if not folder:
        pytest.skip("MOETTA_CIFAR10 does not name a folder with CIFAR-10")
    return Path(folder)


def test_all_models_are_shipped():
    assert set(NAMES) == set(zoo.RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_card_file_and_recipe_agree(name):
    card, recipe = zoo.card(name), zoo.recipe(name)
    data = WEIGHTS.joinpath(f"{name}.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == card["sha256"]
    assert len(data) == card["bytes"] < 5_000_000
    assert card["recipe"] == json.loads(json.dumps(recipe.as_dict()))
    built = recipe.shape.build(recipe.classes)
    assert sum(p.numel() for p in built.parameters()) == card["parameters"]
    shapes = {key: value.shape for key, value in from_bytes(data).items()}
    assert shapes == {key: value.shape for key, value in built.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_says_what_it_expects(name):
    model, recipe = zoo.load(name), zoo.recipe(name)
    assert not model.training
    own = own_preprocess(model)
    assert own is not None
    assert own.mean == pytest.approx(recipe.mean)
    assert own.std == pytest.approx(recipe.std)
    assert own.size == (32, 32)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, recipe.classes)


@pytest.mark.parametrize("name", DIGITS)
def test_the_accuracy_is_the_cards(name):
    model, recipe, card = zoo.load(name), zoo.recipe(name), zoo.card(name)
    for part, key in (("clean", "clean"), ("c/contrast", "contrast")):
        domain = embedded.domain(part)
        with torch.inference_mode():
            right = model(normalise(domain.images, recipe)).argmax(1) == domain.labels
        # Other machines round otherwise: a few images may tip over.
        assert 100 * right.float().mean().item() == pytest.approx(card["accuracy"][key], abs=1.0)


@pytest.mark.parametrize("name", DIGITS)
def test_training_again_from_the_seed_starts_as_recorded(name):
    if name == "digits-vit" and torch.__version__.startswith("2.6."):
        # Seen with torch 2.6.0 and timm 1.0.21: 9.284 where newer ones give the card's 9.230.
        pytest.skip("the oldest torch and timm start from other weights")
    recipe, card = zoo.recipe(name), zoo.card(name)
    trainer, batches = Trainer(recipe), training_batches(recipe, None)
    losses = [trainer.advance(batches) for _ in range(3)]
    assert losses == pytest.approx(card["first_losses"][:3], abs=2e-3)


@pytest.mark.parametrize("name", PHOTOS)
def test_the_accuracy_on_photos_is_the_cards(name, photos):
    model, recipe, card = zoo.load(name), zoo.recipe(name), zoo.card(name)
    domain = cifar10(photos, "test")
    with torch.inference_mode():
        parts = [model(normalise(x, recipe)).argmax(1) for x in domain.images.split(500)]
    right = torch.cat(parts) == domain.labels
    assert 100 * right.float().mean().item() == pytest.approx(card["accuracy"]["clean"], abs=0.5)


@pytest.mark.parametrize("name", PHOTOS)
def test_training_on_photos_again_starts_as_recorded(name, photos):
    recipe, card = zoo.recipe(name), zoo.card(name)
    trainer, batches = Trainer(recipe), training_batches(recipe, photos)
    losses = [trainer.advance(batches) for _ in range(2)]
    assert losses == pytest.approx(card["first_losses"][:2], abs=2e-3)


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    zoo.load(NAMES[0])
    assert torch.equal(torch.rand(2), expected)


def test_damaged_weights_are_refused(tmp_path, monkeypatch):
    name = NAMES[0]
    for ending in ("json", "safetensors"):
        data = bytearray(WEIGHTS.joinpath(f"{name}.{ending}").read_bytes())
        if ending == "safetensors":
            data[-1] ^= 1
        (tmp_path / f"{name}.{ending}").write_bytes(data)
    monkeypatch.setattr("moetta.zoo.shipped_models._WEIGHTS", tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        zoo.load(name)


def test_missing_weights_say_how_to_make_them(tmp_path, monkeypatch):
    monkeypatch.setattr("moetta.zoo.shipped_models._WEIGHTS", tmp_path)
    assert zoo.available() == []
    with pytest.raises(FileNotFoundError, match=f"train-model digits-vit --out {tmp_path}$"):
        zoo.load("digits-vit")
    with pytest.raises(FileNotFoundError, match="--data FOLDER"):
        zoo.load("cifar-vit")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="digits-vit"):
        zoo.card("digit-vit")
