from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moetta.core.functional import entropy, log_classes, masked_mean, reliability

finite = st.floats(-(2.0**100), 2.0**100, width=32)
shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=8)
logits = hnp.arrays("float32", shapes, elements=finite)


@given(logits)
def test_entropy_lies_between_zero_and_ln_c(values) -> None:
    z = torch.from_numpy(values)
    h = entropy(z)
    assert torch.isfinite(h).all()
    assert (h >= 0).all()
    assert (h <= math.log(z.shape[1]) * (1 + 1e-6)).all()


@given(hnp.arrays("float64", shapes, elements=st.floats(-50, 50)))
def test_entropy_is_its_definition(values) -> None:
    z = torch.from_numpy(values)
    p = z.exp() / z.exp().sum(1, keepdim=True)
    torch.testing.assert_close(entropy(z), -(p * p.log()).sum(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropy(z + 7), entropy(z), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_the_gradient_of_the_entropy_is_finite_wherever_logits_are(scale: float) -> None:
    z = (torch.randn(4, 5) * scale).requires_grad_()
    entropy(z).sum().backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_get_a_float32_entropy(dtype: torch.dtype) -> None:
    z = torch.randn(4, 1000).to(dtype)
    assert entropy(z).dtype == torch.float32
    torch.testing.assert_close(entropy(z), entropy(z.float()))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), min_size=1, max_size=12))
def test_masked_mean_is_its_definition(pairs) -> None:
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([keep for _, keep in pairs])
    chosen = [v for v, keep in pairs if keep]
    mean = masked_mean(values, mask)
    assert mean.item() == pytest.approx(sum(chosen) / len(chosen) if chosen else 0.0)
    mean.backward()
    expected = mask / max(len(chosen), 1)
    torch.testing.assert_close(values.grad, expected.double())


def test_the_mean_of_nothing_ignores_what_is_not_finite() -> None:
    values = torch.tensor([math.nan, 2.0, math.inf])
    assert masked_mean(values, torch.tensor([False, True, False])).item() == 2.0
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0.0


def test_reliability_is_a_constant_for_the_gradient() -> None:
    h = torch.tensor([0.5, 2.0], requires_grad=True)
    weight = reliability(h, 1.0)
    torch.testing.assert_close(weight, torch.tensor([math.exp(0.5), math.exp(-1.0)]))
    assert not weight.requires_grad


def test_log_classes() -> None:
    assert log_classes(torch.zeros(2, 1000)) == pytest.approx(6.907755, abs=1e-6)
