"""The answer that both models give together."""

from __future__ import annotations

import pytest
import torch

from moetta.guard.answer import finite, weighted_mean


def test_it_is_a_mean_of_probabilities():
    source, adapted = torch.randn(2, 8, 5, generator=torch.manual_seed(0)).unbind(0)
    mean = 0.3 * adapted.softmax(-1) + 0.7 * source.softmax(-1)
    torch.testing.assert_close(weighted_mean(source, adapted, 0.3, 1.0).exp(), mean)
    assert weighted_mean(source, adapted, 0.0, 1.0) is source


def test_the_surer_model_does_not_decide_for_that_alone():
    """Ten times as sure of the other answer, but at equal sureness less sure than the source."""
    source, adapted = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 10.0]])
    assert weighted_mean(source, adapted, 0.5, 1.0).argmax() == 1
    assert weighted_mean(source, adapted, 0.5, 10.0).argmax() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finite(bad: float):
    assert finite(torch.zeros(3))
    assert not finite(torch.tensor([0.0, bad]))
