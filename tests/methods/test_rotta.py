from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain
from moetta.methods.rotta import COLLECTING, Memory
from moetta.nn.augment import augment

PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def test_the_scores_of_the_definition() -> None:
    memory = Memory(64, 1000, [], 0)
    assert memory.score(0, 0) == 0.5
    assert memory.score(0, math.log(1000)) == pytest.approx(1.5)
    assert memory.score(64, 0) == pytest.approx(0.731059, abs=1e-6)


def test_old_samples_weigh_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one image that came 64 samples ago the loss is sigmoid(-1) of its cross-entropy."""
    monkeypatch.setattr(Memory, "ages", lambda memory: [64] * len(memory.items))
    adapter = moetta.adapt(small_vit(), "rotta", memory=64, **PIXELS)
    # The student gets the augmented images, so the difference is computed from what it sees.
    views: list[Tensor] = []
    adapter.network.register_forward_pre_hook(  # type: ignore[operator]
        lambda _, inputs: views.append(inputs[0].detach().clone())
    )
    adapter(images(64, 0))
    _, kept, view = views
    plain = small_vit().eval()
    with torch.no_grad():
        target, student = plain(kept).softmax(1), plain(view).log_softmax(1)
    expected = 0.268941 * -(target * student).sum(1).mean()
    assert adapter.last is not None
    assert adapter.last.losses["memory"] == pytest.approx(expected.item(), rel=1e-4)


def test_the_worked_example_of_evictions() -> None:
    memory = Memory(2, 4, [], 0)
    slots = [memory.place(label, doubt) for label, doubt in ((0, 1.0), (1, 0.1), (2, 0.5))]
    assert slots == [0, 1, 0]
    assert {item.label for item in memory.items} == {1, 2}


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    classes=st.integers(2, 8),
    samples=st.lists(st.tuples(st.integers(0, 7), st.floats(0, 2)), max_size=60),
)
def test_the_memory_stays_balanced(
    size: int, classes: int, samples: list[tuple[int, float]]
) -> None:
    memory = Memory(size, classes, [], 0)
    for label, doubt in samples:
        memory.place(label % classes, min(doubt, math.log(classes)))
    labels = [item.label for item in memory.items]
    assert len(labels) <= size
    assert memory.seen == len(samples)
    assert all(labels.count(name) <= math.ceil(size / classes) for name in set(labels))
    assert all(age >= 1 for age in memory.ages())


def slots_by_hand(
    items: list[tuple[int, int, float]], now: int, label: int, u: float, n: int, c: int
) -> int | None:
    """The rule for one sample, written out; items are (class, age, entropy)."""

    def score(age: int, doubt: float) -> float:
        return 1 / (1 + math.exp(-age / n)) + doubt / math.log(c)

    held = [i for i, item in enumerate(items) if item[0] == label]
    if len(held) < n / c:
        if len(items) < n:
            return len(items)
        sizes = {name: sum(i[0] == name for i in items) for name in {i[0] for i in items}}
        most = max(sizes.values())
        held = [i for i, item in enumerate(items) if sizes[item[0]] == most]
    worst = max(held, key=lambda i: score(items[i][1], items[i][2]))
    return worst if score(items[worst][1], items[worst][2]) > score(0, u) else None


def test_several_steps_agree_with_the_definition() -> None:
    n, lr, decay = 6, 1e-2, 0.9
    plain = Plain(small_vit().double())
    teacher = small_vit().double().eval().requires_grad_(False)
    adapter = moetta.adapt(small_vit().double(), "rotta", memory=n, lr=lr, decay=decay, **PIXELS)
    optimizer = torch.optim.Adam(plain.parameters, lr=lr)
    slow = dict(teacher.named_parameters())
    items: list[tuple[int, int, float]] = []
    kept: list[Tensor] = []
    seen, steps = 0, 0
    for call, size in enumerate((4, 4, 4, 1, 5)):
        x = images(size, call).double()
        with torch.no_grad():
            z = teacher(x)
        p = z.softmax(1)
        doubt = -(p * (p + 1e-6).log()).sum(1)
        generator = adapter.generator()
        stepped = 0
        for i in range(size):
            label, u = int(p[i].argmax()), float(doubt[i])
            slot = slots_by_hand(items, seen, label, u, n, p.shape[1])
            if slot is not None:
                fresh = (label, 0, u)
                if slot == len(items):
                    items.append(fresh)
                    kept.append(x[i])
                else:
                    items[slot], kept[slot] = fresh, x[i]
            items = [(a, age + 1, b) for a, age, b in items]
            seen += 1
            if seen % n == 0:
                batch = torch.stack(kept)
                with torch.no_grad():
                    target = teacher(batch).softmax(1)
                view = (augment(batch * 0.5 + 0.5, generator) - 0.5) / 0.5
                s = plain.model(view).log_softmax(1)
                ages = torch.tensor([float(age) for _, age, _ in items]).double()
                loss = (torch.sigmoid(-ages / n) * -(target * s).sum(1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for name, mine in zip(plain.names, plain.parameters, strict=True):
                        slow[name].mul_(decay).add_(mine, alpha=1 - decay)
                stepped += len(items)
                steps += 1
        torch.testing.assert_close(adapter(x), z, rtol=1e-4, atol=1e-5)
        assert adapter.last is not None
        assert adapter.last.backwards == stepped
        assert adapter.last.forwards == size + 2 * stepped
        assert adapter.last.skipped == (None if stepped else COLLECTING)
        state = adapter.state_dict()
        for name, mine in zip(plain.names, plain.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(
                state[f"running.teacher.{name}"], slow[name], rtol=1e-3, atol=1e-4
            )
    assert steps == 3


def test_batchnorm_statistics_move_slowly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 5),
    ).eval()  # fmt: skip
    conv, norm, *rest = model
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    given = mean.clone()
    adapter = moetta.adapt(model, "rotta", memory=4, **PIXELS)
    for seed in range(3):
        x = images(4, seed)
        before = adapter.state_dict()
        generator = adapter.generator()
        adapter(x)
        assert adapter.last is not None
        assert adapter.last.skipped is None
        kept = adapter.state_dict()["running.images"]
        held = adapter.state_dict()["running.facts"][:, 0] >= 0
        view = (augment(kept[held] * 0.5 + 0.5, generator) - 0.5) / 0.5
        with torch.no_grad():
            y = conv(view)
            mean = 0.95 * mean + 0.05 * y.mean((0, 2, 3))
            var = 0.95 * var + 0.05 * y.var((0, 2, 3), correction=0)
        state = adapter.state_dict()
        torch.testing.assert_close(state["running.mean.1"], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state["running.var.1"], var, rtol=1e-4, atol=1e-5)
        # The loss that the student saw, with those statistics and the weights of before.
        with torch.no_grad():
            y = (y - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
            weight, bias = before["param.1.weight"], before["param.1.bias"]
            y = y * weight[:, None, None] + bias[:, None, None]
            student = nn.Sequential(*rest)(y).log_softmax(1)
            old = before["running.mean.1"], before["running.var.1"]
            t = (conv(kept[held]) - old[0][:, None, None]) / (old[1][:, None, None] + 1e-5).sqrt()
            slow = before["running.teacher.1.weight"], before["running.teacher.1.bias"]
            t = t * slow[0][:, None, None] + slow[1][:, None, None]
            target = nn.Sequential(*rest)(t).softmax(1)
        births = state["running.facts"][held, 1]
        ages = (state["running.seen"] - births).float()
        loss = (torch.sigmoid(-ages / 4) * -(target * student).sum(1)).mean()
        assert adapter.last.losses["memory"] == pytest.approx(loss.item(), rel=1e-4)
    assert torch.equal(norm.running_mean, given)  # the user's model keeps its own


def test_a_step_that_fails_keeps_neither_statistics_nor_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 5),
    ).eval()  # fmt: skip
    adapter = moetta.adapt(model, "rotta", memory=4, **PIXELS)
    start = adapter.state_dict()
    descend = adapter.descend
    monkeypatch.setattr(adapter, "descend", lambda loss: descend(loss * float("nan")))
    adapter(images(4, 0))
    assert adapter.last is not None
    assert adapter.last.skipped == "non-finite loss or gradient"
    state = adapter.state_dict()
    for name in ("running.mean.1", "running.var.1", "param.1.weight"):
        assert torch.equal(state[name], start[name])
    # Two steps in one batch, of which only the second fails: the batch was learnt from.
    adapter = moetta.adapt(model, "rotta", memory=4, **PIXELS)
    turns = iter((1.0, float("nan")))
    good = adapter.descend
    monkeypatch.setattr(adapter, "descend", lambda loss: good(loss * next(turns)))
    adapter(images(8, 0))
    assert adapter.last is not None
    assert adapter.last.skipped is None
    assert adapter.last.backwards > 0


def test_images_of_another_size_are_refused_and_change_nothing() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 5),
    )  # fmt: skip
    adapter = moetta.adapt(model, "rotta", memory=4, **PIXELS)
    adapter(torch.randn(2, 3, 16, 16))
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="rotta remembers images of shape"):
        adapter(torch.randn(2, 3, 8, 8))
    after = adapter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
