"""The source model, and how far the adapted parameters are from it."""

from __future__ import annotations

import pytest
import torch

from helpers.models import VIT
from helpers.trials import assert_same, make
from moetta.core.inputs import Inputs
from moetta.guard.reference import Reference

LR = 1e-3


def images(seed: int) -> torch.Tensor:
    return VIT.batch(16, seed)[0]


def test_drift_is_relative_to_the_parameters_own_norm():
    adapter = make("tent", lr=LR)
    reference = Reference(adapter)
    assert reference.drift() == 0
    with torch.no_grad():
        for parameter in adapter.trained.values():
            parameter.mul_(1.03)
    assert reference.drift() == pytest.approx(0.03, rel=1e-4)


def test_offsets_that_start_at_zero_are_compared_with_what_they_are_added_to():
    """One expert of every layer moves by 3 % of the layer's scale and shift."""
    adapter = make("moetta_plus", lr=LR)
    reference = Reference(adapter)
    assert reference.drift() == 0
    network = dict(adapter.network.named_parameters())
    with torch.no_grad():
        for name, parameter in network.items():
            if name.endswith(("expert_weight", "expert_bias")):
                parameter[2] += 0.03 * network[name.replace("expert_", "")]
    assert reference.drift() == pytest.approx(0.03, rel=1e-4)


def test_without_trained_parameters_nothing_drifts():
    assert Reference(make("noadapt")).drift() == 0


@pytest.mark.parametrize("method", ["tent", "moetta_plus"])
def test_the_source_is_the_start_of_an_adapter_that_has_learnt(method: str):
    adapter = make(method, lr=LR)
    early = Reference(adapter)
    for seed in range(3):
        adapter(images(seed))
    late = Reference(adapter)
    assert late.drift() == early.drift() > 0
    with torch.no_grad():
        expected = VIT.shared()(images(9))
    for reference in (early, late):
        assert_same(reference.logits(Inputs((images(9),), {})), expected)
