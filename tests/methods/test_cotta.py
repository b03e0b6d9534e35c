from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import moetta
from helpers.cells import vit_b
from helpers.models import CLASSES, FAMILIES, call, images, perceptron, small_vit
from moetta.methods.cotta import bernoulli_positions
from moetta.nn.augment import augment

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


class Reference:
    """CoTTA with three separate models, written from the definition."""

    def __init__(self, model: nn.Module, lr: float, decay: float, restore_all: bool) -> None:
        self.student, self.teacher, self.anchor = (copy.deepcopy(model) for _ in range(3))
        self.source = {n: p.detach().clone() for n, p in model.named_parameters()}
        names = [n for n in self.source if n.split(".")[-1] in ("weight", "bias")]
        self.trained = [(n, self.student.get_parameter(n)) for n in names]
        self.sgd = torch.optim.SGD([p for _, p in self.trained], lr=lr, momentum=0.9)
        self.decay, self.restore_all = decay, restore_all

    def step(self, x: Tensor, views: list[Tensor] | None = None) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
            if views is not None:
                target = torch.stack([self.teacher(v) for v in views]).mean(0)
        p_t, z_s = target.softmax(1), self.student(x)
        p_s = z_s.softmax(1)
        loss = (-0.5 * (p_t * p_s.log()).sum(1) - 0.5 * (p_s * p_t.log()).sum(1)).mean()
        self.sgd.zero_grad()
        loss.backward()
        self.sgd.step()
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.copy_(self.decay * t + (1 - self.decay) * s)
            if self.restore_all:
                for name, p in self.trained:
                    p.copy_(self.source[name])
        return target


@pytest.mark.parametrize("restore", [0.0, 1.0])
def test_steps_are_what_the_definition_says(restore: float):
    model = small_vit(depth=3, classes=7)
    adapter = moetta.adapt(model, "cotta", lr=0.02, decay=0.9, restore=restore)
    reference = Reference(model, 0.02, 0.9, restore == 1.0)
    for seed in range(5):
        x = images(6, seed)
        torch.testing.assert_close(adapter(x), reference.step(x), rtol=1e-4, atol=1e-5)
    for name, parameter in reference.trained:
        torch.testing.assert_close(adapter.trained[name], parameter, rtol=1e-4, atol=1e-5)
        expected = reference.teacher.get_parameter(name)
        torch.testing.assert_close(
            adapter.running[f"teacher.{name}"], expected, rtol=1e-4, atol=1e-5
        )
    if restore:
        assert torch.equal(adapter.model(images(6)), model(images(6)))


def test_an_unsure_source_makes_the_teacher_look_at_augmented_views():
    model = small_vit(classes=7)
    settings = {"lr": 0.02, "decay": 0.9, "restore": 0.0, "threshold": 1.0, "augmentations": 3}
    adapter = moetta.adapt(model, "cotta", **settings, **HALF, seed=5)
    reference = Reference(model, 0.02, 0.9, False)
    for seed in range(2):
        x = images(4, seed)
        draw = adapter.generator()
        views = [augment(x * 0.5 + 0.5, draw) * 2 - 1 for _ in range(3)]
        torch.testing.assert_close(adapter(x), reference.step(x, views), rtol=1e-4, atol=1e-4)
        assert adapter.last is not None
        assert adapter.last.forwards == 4 * (3 + 2)
        assert adapter.last.backwards == 4


def test_the_anchor_decides_on_the_views():
    model = small_vit()
    x = images(8)
    confidence = model(x).softmax(1).amax(1).mean().item()
    for threshold, forwards in ((confidence - 1e-3, 3), (confidence + 1e-3, 34)):
        adapter = moetta.adapt(model, "cotta", threshold=threshold, **HALF)
        adapter(x)
        assert adapter.totals.forwards == 8 * forwards


def test_a_missing_normalisation_is_told_before_the_batch_that_needs_it():
    network = perceptron()  # says nothing of its pixels
    with pytest.warns(match="pass mean= and std="):
        moetta.adapt(network, "cotta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moetta.adapt(network, "cotta", threshold=0)
        moetta.adapt(network, "cotta", **HALF)


def test_all_weights_and_biases_are_trained_and_nothing_else():
    model = small_vit()
    adapter = moetta.adapt(model, "cotta")
    left = {n for n, _ in model.named_parameters()} - adapter.trained.keys()
    assert left == {"cls_token", "pos_embed"}
    assert adapter.activated_parameters == sum(p.numel() for p in adapter.trained.values())


def test_vit_b_activates_what_the_paper_says():
    assert moetta.adapt(vit_b(), "cotta").activated_parameters == 86_415_592


def test_the_student_learns_under_autocast():
    # Autocast keeps low-precision copies of weights; the passes without gradient must leave none.
    model = small_vit()
    adapter = moetta.adapt(model, "cotta", lr=0.1, restore=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        adapter(images(8))
    still = [n for n, p in adapter.trained.items() if torch.equal(p, model.get_parameter(n))]
    assert still == []


def test_restoring_touches_the_share_asked_for():
    model = small_vit()
    adapter = moetta.adapt(model, "cotta", lr=0.1, restore=0.25)
    adapter(images(8))
    same = total = 0
    for name, parameter in adapter.trained.items():
        moved = adapter.running[f"teacher.{name}"] != model.get_parameter(name)
        same += int(((parameter == model.get_parameter(name)) & moved).sum())
        total += int(moved.sum())
    assert total > 5_000
    assert abs(same / total - 0.25) < 0.02


@pytest.mark.parametrize("probability", [0.001, 0.3, 1.0])
def test_positions_are_independent_coins(probability: float):
    total, rounds = 2_000, 200
    g = torch.Generator().manual_seed(0)
    hits = torch.zeros(total)
    counts = []
    for _ in range(rounds):
        places = bernoulli_positions(total, probability, g)
        assert (places.diff() > 0).all()
        assert places.numel() == 0 or (places[0] >= 0 and places[-1] < total)
        hits[places] += 1
        counts.append(len(places))
    spread = math.sqrt(probability * (1 - probability) / (total * rounds))
    assert abs(hits.mean() / rounds - probability) <= 4 * spread
    sd = torch.tensor(counts, dtype=torch.float64).std()
    assert abs(sd - math.sqrt(total * probability * (1 - probability))) <= 0.2 * sd + 1e-9
    halves = hits.view(2, -1).mean(1) / rounds
    assert (halves - probability).abs().max() <= 6 * spread


def test_no_coin_falls_heads_at_zero():
    assert len(bernoulli_positions(100, 0.0, torch.Generator())) == 0


def test_paused_and_merged_are_the_teacher():
    model = small_vit()
    adapter = moetta.adapt(model, "cotta", lr=0.05, decay=0.5)
    for seed in range(3):
        adapter(images(8, seed))
    x = images(8, 9)
    with adapter.paused():
        paused = adapter(x)
    assert torch.equal(adapter.merge()(x), paused)
    assert torch.equal(adapter(x), paused)
    assert not torch.allclose(adapter.model(x), paused)


def test_save_load_and_reset_go_on_bit_for_bit(tmp_path: Path):
    model = small_vit()
    settings = {"lr": 0.05, "decay": 0.9, "restore": 0.2, "threshold": 1.0, "augmentations": 2}
    adapter = moetta.adapt(model, "cotta", **settings, **HALF)
    first = [adapter(images(4, seed)) for seed in range(3)]
    adapter.save(tmp_path / "state.safetensors")
    second = [adapter(images(4, seed)) for seed in range(3, 6)]
    fresh = moetta.adapt(model, "cotta", **settings, **HALF)
    fresh.load(tmp_path / "state.safetensors")
    for seed, expected in zip(range(3, 6), second, strict=True):
        assert torch.equal(fresh(images(4, seed)), expected)
    fresh.reset()
    for seed, expected in enumerate(first):
        assert torch.equal(fresh(images(4, seed)), expected)


def test_permuting_a_batch_permutes_the_answers():
    model = small_vit()
    order = torch.tensor([3, 1, 0, 2])
    a, b = (moetta.adapt(model, "cotta", lr=0.02, restore=0.01) for _ in range(2))
    for seed in range(3):
        x = images(4, seed)
        torch.testing.assert_close(a(x)[order], b(x[order]), rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_and_batch_norm_work():
    family = FAMILIES["timm_resnet"]
    adapter = moetta.adapt(family.model(), "cotta", lr=0.01)
    for size in (4, 1):
        assert torch.isfinite(call(adapter, family.batch(size))).all()
    assert all(torch.isfinite(p).all() for p in adapter.trained.values())


def unchanged(adapter: moetta.Adapter, batch: object, message: str) -> None:
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=message):
        call(adapter, batch)  # type: ignore[arg-type]
    after = adapter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_augmenting_without_knowing_the_normalisation_is_refused():
    adapter = moetta.adapt(small_vit(), "cotta", threshold=1.0)
    unchanged(adapter, (images(4),), "pass mean= and std=")
    wrong = moetta.adapt(small_vit(), "cotta", threshold=1.0, mean=(0.5, 0.5), std=(1.0, 1.0))
    unchanged(wrong, (images(4),), "3 channels, but mean= and std= give 2")


def test_augmenting_text_is_refused_and_not_augmenting_it_works():
    family = FAMILIES["hf_bert"]
    unchanged(moetta.adapt(family.model(), "cotta", threshold=1.0), family.batch(4), "threshold=0")
    adapter = moetta.adapt(family.model(), "cotta", threshold=0.0)
    assert call(adapter, family.batch(4)).shape == (4, CLASSES)


def test_a_timm_model_says_how_its_pixels_are_normalised():
    model = timm.create_model("test_vit", num_classes=10)
    x = images(2, side=160)
    settings = {"threshold": 1.0, "augmentations": 2}
    own = moetta.adapt(model, "cotta", **settings)(x)
    cfg = model.pretrained_cfg
    said = moetta.adapt(model, "cotta", **settings, mean=cfg["mean"], std=cfg["std"])(x)
    other = moetta.adapt(model, "cotta", **settings, mean=(0.0,), std=(1.0,))(x)
    assert torch.equal(own, said)
    assert not torch.equal(own, other)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": 2.0}, "threshold"),
        ({"restore": -0.1}, "restore"),
        ({"augmentations": 0}, "augmentations"),
        ({"mean": (0.5,)}, "both mean and std"),
        ({"mean": (0.5,), "std": (0.0,)}, "std must be above 0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        moetta.adapt(small_vit(), "cotta", **wrong)


def test_a_model_without_weights_is_refused():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :5] * self.scale

    with pytest.raises(ValueError, match="trains weights and biases, but this model has none"):
        moetta.adapt(Bare(), "cotta")
