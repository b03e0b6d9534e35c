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
    adapter = moetta.adapt(model, "rotta", memory=4, **PIXELS)
    x = images(4, 0)
    adapter(x)
    state = adapter.state_dict()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    moved = state["running.mean.1"] - norm.running_mean
    assert 0 < float(moved.abs().max()) < 0.05 * float(model[0](x * 3).detach().abs().max())
    assert torch.equal(norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]


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
