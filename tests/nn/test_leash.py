from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moetta.nn.leash import Leash

SCALE = torch.tensor(10.0)
shares = st.floats(0.001, 0.2)


def distance(tensors: list[Tensor]) -> Tensor:
    """Each expert's joint norm, by another way than the leash's own."""
    return torch.cat(tensors, 1).norm(dim=1)


def drawn(seed: int, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(3, width, generator=generator) for width in (4, 2, 7)]


@settings(max_examples=60, deadline=None)
@given(
    radius=shares,
    stride=shares,
    pull=st.floats(0, 0.5),
    portion=st.floats(0.01, 1),
    size=st.floats(1e-4, 30),
    seed=st.integers(0, 99),
)
def test_no_step_is_longer_than_the_stride_and_no_expert_beyond_the_radius(
    radius: float, stride: float, pull: float, portion: float, size: float, seed: int
) -> None:
    leash = Leash(SCALE, radius, stride, pull)
    before = drawn(seed, 0.01)
    offsets = [b + d for b, d in zip(before, drawn(seed + 1, size), strict=True)]
    wanted = [o - b for o, b in zip(offsets, before, strict=True)]
    leash.hold(offsets, before, portion)
    assert distance(offsets).max() <= radius * 10 * (1 + 1e-5)
    # Undo the pull: what is left is the step, where the radius did not cut it.
    moved = [o / (1 - pull * portion) - b for o, b in zip(offsets, before, strict=True)]
    free = distance(offsets) < radius * 10 * (1 - 1e-4)
    limit = distance(wanted).clamp(max=stride * portion * 10)
    torch.testing.assert_close(distance(moved)[free], limit[free], rtol=1e-3, atol=1e-4)


def test_a_short_step_is_left_as_it_is() -> None:
    before, offsets = drawn(0, 0.01), drawn(1, 0.01)
    wanted = [offset.clone() for offset in offsets]
    Leash(SCALE, radius=0.5, stride=0.5, pull=0.0).hold(offsets, before, 1.0)
    torch.testing.assert_close(offsets, wanted)


def test_experts_are_shortened_one_by_one() -> None:
    """A long step of one expert does not shorten the others'."""
    before = [torch.zeros(2, 4)]
    offsets = [torch.tensor([[8.0, 0, 0, 0], [0.1, 0, 0, 0]])]
    Leash(SCALE, radius=1.0, stride=0.1, pull=0.0).hold(offsets, before, 1.0)
    torch.testing.assert_close(offsets[0][:, 0], torch.tensor([1.0, 0.1]))


@pytest.mark.parametrize(("part", "left"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.0), (1.5, 0.0)])
def test_the_brake_leaves_one_minus_the_square_of_the_distance(part: float, left: float) -> None:
    leash = Leash(SCALE, radius=0.1, stride=0.0, pull=0.0)
    offsets = [torch.tensor([[part, 0.0], [0.0, 0.0]])]  # the radius is 1
    (grad,) = leash.braked(offsets, [torch.ones(2, 2)])
    torch.testing.assert_close(grad, torch.tensor([[left, left], [1.0, 1.0]]))


def test_a_leash_of_zeros_lets_go() -> None:
    leash = Leash(SCALE, radius=0.0, stride=0.0, pull=0.0)
    before, offsets, grads = drawn(0, 1), drawn(1, 50), drawn(2, 1)
    wanted = [offset.clone() for offset in offsets]
    torch.testing.assert_close(leash.braked(offsets, grads), grads)
    leash.hold(offsets, before, 0.5)
    torch.testing.assert_close(offsets, wanted)
