import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from moetta.zoo.networks import ResNetShape, ViTShape
from moetta.zoo.recipes import RECIPES, Augment
from moetta.zoo.train_and_measure import training_batches
from moetta.zoo.trainer import Trainer, augment, epochs, learning_rate, normalise

TINY = replace(
    RECIPES["digits-vit"],
    shape=ViTShape(dim=24, depth=1, heads=2, patch=8, drop_path=0.1),
    steps=6,
    batch_size=16,
)


def test_the_same_seed_gives_the_same_weights():
    batches = training_batches(TINY, None)
    weights = []
    for _ in range(2):
        torch.rand(7)  # what the global generator holds must not matter
        trainer = Trainer(TINY)
        trainer.fit(batches, None)
        weights.append(trainer.average)
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_training_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Trainer(TINY).advance(training_batches(TINY, None))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "change",
    [{}, {"optimiser": "muon"}, {"shape": ResNetShape(dims=(8, 8, 8, 8))}],
    ids=["adamw", "muon", "batch-norm"],
)
def test_a_resumed_training_ends_exactly_as_an_unbroken_one(tmp_path, change):
    made_by = replace(TINY, **change)
    batches = training_batches(made_by, None)
    unbroken = Trainer(made_by)
    unbroken.fit(batches, None)
    first = Trainer(made_by)
    for _ in range(3):
        first.advance(batches)
    first.save(tmp_path / "checkpoint.safetensors")
    second = Trainer(made_by)
    second.load(tmp_path / "checkpoint.safetensors")
    assert second.step == 3
    second.fit(batches, None)
    assert second.first_losses == unbroken.first_losses
    for name, value in unbroken.average.items():
        assert torch.equal(value, second.average[name]), name


def test_batch_statistics_are_those_of_the_averaged_weights():
    made_by = replace(TINY, shape=ResNetShape(dims=(8, 8, 8, 8)))
    batches = training_batches(made_by, None)
    trainer = Trainer(made_by)
    trainer.fit(batches, None)
    torch.manual_seed(5)
    weights = trainer.averaged(batches, count=2)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(1), expected)  # the global generator was left alone
    model = made_by.shape.build(made_by.classes)
    model.load_state_dict(trainer.average)
    assert isinstance(model.conv1, nn.Sequential)
    first, seen = model.conv1[0], []
    for step in (4, 5):  # the last two of six
        with torch.no_grad():
            seen.append(first(normalise(batches(step)[0], made_by)).transpose(0, 1).flatten(1))
    mean = torch.stack([x.mean(1) for x in seen]).mean(0)
    var = torch.stack([x.var(1) for x in seen]).mean(0)
    torch.testing.assert_close(weights["conv1.1.running_mean"], mean)
    torch.testing.assert_close(weights["conv1.1.running_var"], var)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_without_batch_norm_the_average_is_what_is_kept():
    trainer, batches = Trainer(TINY), training_batches(TINY, None)
    trainer.advance(batches)
    kept = trainer.averaged(batches)
    assert kept.keys() == trainer.average.keys()
    assert all(torch.equal(kept[name], value) for name, value in trainer.average.items())


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    Trainer(TINY).save(path)
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(replace(TINY, lr=0.1)).load(path)


def test_the_loss_falls():
    fast = replace(TINY, steps=80, batch_size=50, lr=3e-3, label_smoothing=0.0)
    images, labels = training_batches(replace(fast, batch_size=50), None)(0)
    trainer = Trainer(fast)
    losses = [trainer.advance(lambda _: (images, labels)) for _ in range(80)]
    assert losses[0] > 9  # chance: ln 100 + 2 ln 10
    assert losses[-1] < 6.5


def test_the_learning_rate_rises_then_falls_to_nothing():
    rates = [learning_rate(replace(TINY, steps=100, warmup=0.1, lr=1.0), s) for s in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] < 1e-3


def test_every_epoch_shows_each_image_once():
    images = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 3, 2, 2)
    batch = epochs(images, torch.arange(20), 5, seed=0)
    first, second = (torch.cat([batch(e * 4 + i)[1] for i in range(4)]) for e in range(2))
    assert first.sort().values.equal(torch.arange(20))
    assert second.sort().values.equal(torch.arange(20))
    assert not first.equal(second)
    assert torch.equal(batch(1)[1], first[5:10])  # any step can be asked for again


def test_augmentation_moves_and_recolours_but_keeps_the_range():
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    full = Augment(flip=True, crop=4, cutout=8, brightness=0.2, contrast=0.3, saturation=0.3)
    out = augment(images, full, torch.Generator().manual_seed(0))
    assert out.shape == images.shape
    assert out.min() >= 0
    assert out.max() <= 255
    assert not torch.equal(out, images.float())
    same = augment(images, Augment(), torch.Generator().manual_seed(0))
    assert torch.equal(same, images.float())


def test_flipping_alone_mirrors_about_half():
    images = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8)
    out = augment(images, Augment(flip=True), torch.Generator().manual_seed(0))
    mirrored = (out == images.flip(-1)).flatten(1).all(1)
    kept = (out == images).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 70 < mirrored.sum() < 130
