"""Copies of one image in a batch are classified and learnt from once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moetta
from helpers.models import VIT
from helpers.trials import assert_same, make
from moetta.core.inputs import Inputs
from moetta.guard.once import Once, first_alike


def batch(*tensors: Tensor, **named: Tensor) -> Inputs:
    return Inputs(tensors, named)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_copies_are_left_out_and_answered(numbers: list[int]):
    images = torch.randn(6, 3, 4, 4, generator=torch.manual_seed(0))[numbers]
    inputs = batch(images)
    once = Once.of(inputs)
    left = once.select(inputs)
    assert len(left) == len(set(numbers))
    assert torch.equal(once.rows(left.main), images)


def test_a_batch_without_copies_is_left_alone():
    images = torch.randn(8, 3, 4, 4)
    once = Once.of(batch(images))
    assert once.place is None
    assert once.select(batch(images)).main is images


def test_equal_sums_are_not_equal_images():
    images = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]])
    assert first_alike(batch(images)) is None
    assert first_alike(batch(torch.cat((images, images[1:2])))) is None  # missed, which is harmless
    assert first_alike(batch(torch.cat((images, images[:1])))).tolist() == [0, 1, 2, 0]


def test_every_tensor_of_a_sample_counts():
    """Two texts with the same words and another mask are two texts; a scale is not of a sample."""
    ids, mask = torch.tensor([[1, 2], [1, 2], [1, 2]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    found = first_alike(batch(input_ids=ids, attention_mask=mask, scale=torch.tensor(2.0)))
    assert found.tolist() == [0, 1, 0]


@pytest.mark.parametrize("method", ["tent", "moetta", "moetta_plus", "eata"])
def test_a_guard_learns_as_if_copies_had_not_come(method: str):
    plain, poisoned = (moetta.Guard(make(method, lr=1e-4), reweigh=False) for _ in range(2))
    for seed in range(4):
        images = VIT.batch(16, seed)[0]
        order = torch.tensor([*range(16), *[3] * 20, 7])
        answers, with_copies = plain(images), poisoned(images[order])
        assert_same(with_copies, answers[order])
        assert poisoned.last.samples == 37
        assert_same(poisoned.last.entropy, plain.last.entropy[order])
    mine, theirs = plain.state_dict(), poisoned.state_dict()
    apart = "guard.numbers"  # totals count the copies
    assert_same(
        {k: v for k, v in mine.items() if k != apart},
        {k: v for k, v in theirs.items() if k != apart},
    )
    assert poisoned.totals.forwards == plain.totals.forwards


def test_routing_and_answers_are_told_for_the_whole_batch():
    guard = moetta.Guard(make("moetta"), reweigh=False)
    told: list[tuple[Tensor, dict[str, Tensor]]] = []
    images = VIT.batch(6, 0)[0][[0, 1, 1, 2, 0]]
    guard.on_prediction = lambda logits: told.append((logits, guard.routing(5)))
    logits = guard(images)
    assert_same(told[0][0], logits)
    assert torch.equal(logits[1], logits[2])
    assert torch.equal(logits[0], logits[4])
    routing = told[0][1]
    assert routing.keys() == guard.expert_counts().keys() == guard.last.routing.keys()
    assert guard.experts().keys() == guard.adapter.experts().keys() == routing.keys()
    for name, experts in routing.items():
        assert len(experts) == 5
        assert torch.equal(experts[0], experts[4])
        assert torch.equal(experts, guard.last.routing[name])
    with guard.paused():
        assert guard(images).shape == logits.shape
    assert guard.last.samples == 5
