"""COME is an objective that several methods take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moetta
from helpers.models import images, small_vit
from helpers.reference import LR, Plain, opinion_entropies
from moetta.core.functional import opinion, opinion_entropy

ROW = torch.tensor([[2.0, 0.5, -1.0]], dtype=torch.float64)


def test_the_opinion_of_the_definition() -> None:
    shares = opinion(torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64))
    expected = [0.596418, 0.080716, 0.080716, 0.242149]
    assert shares[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_values_of_the_definition() -> None:
    sure = opinion_entropy(torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64))
    assert sure.item() == pytest.approx(1.057949, abs=2e-6)
    flat = opinion_entropy(torch.zeros(1, 3, dtype=torch.float64))
    assert flat.item() == pytest.approx(1.242453, abs=5e-6)
    thousand = opinion_entropy(torch.zeros(1, 1000, dtype=torch.float64))
    assert thousand.item() == pytest.approx(4.147, abs=2e-3)


def test_the_gradient_is_orthogonal_to_the_logits() -> None:
    z = ROW.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(opinion_entropy(z).sum(), z)
    assert grad[0].tolist() == pytest.approx([-0.068784, 0.190258, -0.042438], abs=1e-5)
    assert float((grad * ROW).sum()) == pytest.approx(0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-500, 500), min_size=2, max_size=6))
def test_it_is_finite_and_positive_whatever_the_logits(row: list[float]) -> None:
    z = torch.tensor([row], requires_grad=True)
    value = opinion_entropy(z)
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert torch.isfinite(value).all()
    assert (value > -1e-5).all()
    assert torch.isfinite(grad).all()


def test_tents_steps_with_it_agree_with_plain_autograd() -> None:
    plain = Plain(small_vit().double())
    adapter = moetta.adapt(small_vit().double(), "tent", lr=LR, objective="come")
    for seed, size in enumerate((8, 1, 4)):
        x = images(size, seed).double()
        z = plain.model(x)
        loss = opinion_entropies(z).mean()
        plain.step(plain.gradient(loss))
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-6)
        plain.assert_agrees(adapter.state_dict())
        assert adapter.last is not None
        p = z.detach().softmax(1)
        shannon = -(p * p.log()).sum(1)  # the report stays the ordinary entropy
        torch.testing.assert_close(adapter.last.entropy, shannon, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "moetta"])
def test_every_method_that_takes_it_learns(method: str) -> None:
    extra = {"fisher_weight": 0.0, "margin": 2.0} if method == "eata" else {}
    known = moetta.list_methods()[method].config.preset(objective="come").to_dict()
    eager = {k: 1.5 for k in ("e0",) if k in known}
    one = moetta.adapt(small_vit(), method, objective="come", lr=LR, **eager, **extra)
    other = moetta.adapt(small_vit(), method, lr=LR, **eager, **extra)
    for turn in range(2):
        one(images(8, turn))
        other(images(8, turn))
        assert one.last is not None
        assert one.last.skipped is None
    mine, theirs = one.state_dict(), other.state_dict()
    moved = [k for k in mine if k.startswith("param.")]
    assert any(not torch.equal(mine[k], theirs[k]) for k in moved)
