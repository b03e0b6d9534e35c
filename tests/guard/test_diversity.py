"""Bursts of one class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.guard.detectors import MEMORY
from moetta.guard.diversity import BURST, LONG_RUN, Diversity
from moetta.guard.watch import Watch

SIZE = 16


def balanced(classes: int, seed: int) -> torch.Tensor:
    return torch.randint(classes, (SIZE,), generator=torch.manual_seed(seed))


def test_nothing_is_known_before_the_first_look():
    assert Diversity(10, SIZE).share == 1


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_ordinary_traffic_is_no_burst(classes: int):
    diversity = Diversity(classes, SIZE)
    for seed in range(500):
        diversity.add(balanced(classes, seed))
        assert diversity.share == 1


def test_a_few_of_many_classes_are_no_burst():
    diversity = Diversity(1000, SIZE)
    for seed in range(100):
        diversity.add(balanced(4, seed))
        assert diversity.share == 1


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_nothing_but_one_class_is_a_burst(classes: int):
    diversity = Diversity(classes, SIZE)
    for seed in range(20):
        diversity.add(balanced(classes, seed))
    diversity.add(torch.zeros(SIZE, dtype=torch.long))
    assert diversity.share == 0


def test_the_share_is_that_of_the_diversity():
    """One image of sixteen is of the other class: 15 of 120 pairs differ."""
    diversity = Diversity(2, SIZE)
    diversity.add(torch.tensor([0] * 15 + [1]))
    assert diversity.latest == pytest.approx(15 / 120)
    usual = 1 - ((MEMORY * 8 + 15) ** 2 + (MEMORY * 8 + 1) ** 2) / (MEMORY * 16 + 16) ** 2
    assert diversity.share == pytest.approx((15 / 120) / usual)
    assert diversity.share < BURST


def test_a_stream_of_one_class_becomes_the_usual():
    """Nine in ten images of one class, for ever: that is no burst but the traffic."""
    diversity = Diversity(10, SIZE)
    look = torch.tensor([0] * 14 + [1, 2])
    diversity.add(look)
    assert diversity.share < BURST
    for _ in range(3 * LONG_RUN):
        diversity.add(look)
    assert diversity.share == 1


def test_a_single_image_is_no_burst():
    diversity = Diversity(10, 1)
    diversity.add(torch.tensor([3]))
    assert diversity.share == 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=20))
def test_it_is_a_share(looks: list[list[int]]):
    diversity = Diversity(3, 4)
    for look in looks:
        diversity.add(torch.tensor(look))
        assert 0 <= diversity.share <= 1


def test_it_outlives_an_alarm_and_is_restored():
    """It is about the traffic, not about the adapted model."""
    watch = Watch(SIZE, 0.005, 10_000)
    logits = torch.eye(10)[torch.zeros(SIZE, dtype=torch.long)]
    watch.add(logits, logits)
    assert watch.diverse == 0
    watch.clear()
    assert watch.diverse == 0
    other = Watch(SIZE, 0.005, 10_000)
    other.restore(watch.state())
    assert other.diverse == 0
    assert torch.equal(other.diversity.counts, watch.diversity.counts)
