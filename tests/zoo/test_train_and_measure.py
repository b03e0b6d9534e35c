"""From a recipe to a weights file and its card."""

from dataclasses import replace

import pytest
from PIL import Image

from moetta.data import UnreadableImage
from moetta.data.catalogue import SMALL_SETS
from moetta.zoo import RECIPES, train_model
from moetta.zoo.networks import ViTShape

TINY = replace(
    RECIPES["digits-vit"],
    shape=ViTShape(dim=24, depth=1, heads=2, patch=8, drop_path=0.1),
    steps=6,
    batch_size=16,
)


def test_train_writes_weights_and_card_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "digits-vit", TINY)
    steps = []
    card = train_model("digits-vit", tmp_path, steps=2, report=lambda *step: steps.append(step))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["digits-vit.json", "digits-vit.safetensors"]
    assert card["recipe"]["steps"] == 2
    assert [step for step, _ in steps] == [1, 2]
    assert [loss for _, loss in steps] == pytest.approx(card["first_losses"], abs=1e-6)
    assert set(card["accuracy"]) == {"clean", *card["entropy"]}
    assert len(card["accuracy"]) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet"}, "no shipped model 'resnet'"),
        ({"name": "cifar-vit"}, "trained on CIFAR-10: name its folder with --data"),
        ({"name": "digits-vit", "steps": 0}, "steps must be 1 to"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_model(out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


class TestPhotos:
    """Training on CIFAR-10, of which a folder here holds two images per class."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        small = replace(SMALL_SETS["cifar10"], images={"train": 20, "test": 20})
        monkeypatch.setitem(SMALL_SETS, "cifar10", small)
        for place in (f"{s}/{c}" for s in ("train", "test") for c in small.classes):
            (tmp_path / "photos" / place).mkdir(parents=True)
            for i in range(2):
                image = Image.new("RGB", (32, 32), (100 * i, 50, 0))
                image.save(tmp_path / "photos" / place / f"{i}.png")
        return tmp_path / "photos"

    def refused(self, folder, error, message):
        with pytest.raises(error, match=message):
            train_model("cifar-vit", folder / "out", data=folder, steps=1)
        assert not (folder / "out").exists()

    def test_an_unreadable_image_is_named(self, folder):
        (folder / "train/ship/1.png").write_bytes(b"not an image")
        self.refused(folder, UnreadableImage, r"train.ship.1\.png")

    def test_the_test_set_is_opened_before_training(self, folder):
        (folder / "test/cat/0.png").unlink()
        self.refused(folder, ValueError, "expected 20 images.*found 19")
        (folder / "test").rename(folder / "tests")
        self.refused(folder, FileNotFoundError, "expected test/<class>")
