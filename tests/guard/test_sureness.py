"""How much surer the adapted model is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.core.functional import entropy
from moetta.guard.sureness import TEMPERATURES, Sureness
from moetta.guard.watch import Watch


def logits(seed: int, classes: int = 10) -> torch.Tensor:
    return 3 * torch.randn(64, classes, generator=torch.manual_seed(seed))


def after(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Sureness:
    sureness = Sureness()
    for source, adapted in pairs:
        sureness.add(sureness.measure(source, adapted))
    return sureness


def test_nothing_is_known_before_the_first_look():
    assert Sureness().temperature == 1


@given(st.floats(1.0, 7.9), st.sampled_from([2, 10, 1000]), st.integers(0, 9))
def test_it_finds_the_factor_of_the_logits(factor: float, classes: int, seed: int):
    source = logits(seed, classes)
    found = after((source, factor * source)).temperature
    assert found == pytest.approx(factor, rel=0.02)


def test_both_models_are_equally_sure_at_this_temperature():
    source, adapted = logits(0), 2.5 * logits(1)
    temperature = after((source, adapted)).temperature
    found = entropy(adapted / temperature).mean()
    torch.testing.assert_close(found, entropy(source).mean(), rtol=0.02, atol=0)


def test_a_less_sure_model_is_taken_at_its_word():
    assert after((logits(0), 0.5 * logits(0))).temperature == 1


def test_it_has_a_largest_value():
    assert after((logits(0), 1e4 * logits(0))).temperature == TEMPERATURES[-1]


def test_it_forgets():
    pairs = [(logits(i), 4 * logits(i)) for i in range(20)] + [
        (logits(i), logits(i)) for i in range(400)
    ]
    assert after(*pairs).temperature == pytest.approx(1, abs=0.02)


def test_a_model_that_is_twice_as_sure_has_half_the_weight():
    """It overrules nothing, and no detector finds anything."""
    watch = Watch(16, 0.005, 10_000)
    for seed in range(20):
        assert watch.add(logits(seed), 2 * logits(seed)) is None
    assert watch.trust == pytest.approx(0.5, abs=0.01)
    assert watch.temperature == pytest.approx(2, abs=0.04)
    other = Watch(16, 0.005, 10_000)
    other.restore(watch.state())
    assert other.temperature == watch.temperature
    watch.clear()
    assert watch.temperature == 1
