"""How far the adapted model is trusted, from what it overrules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.guard.detectors import MEMORY
from moetta.guard.trust import Trust, confidence_in_doubt

CONFIDENCES = torch.linspace(0.4, 1.0, 16, dtype=torch.float64)


def after(differ: torch.Tensor, looks: int = 200, classes: int = 10) -> float:
    trust = Trust(classes)
    for _ in range(looks):
        trust.add(CONFIDENCES, differ)
    return trust.value


def test_nothing_is_held_against_a_model_that_changes_nothing():
    assert Trust(10).value == 1
    assert after(torch.zeros(16, dtype=torch.bool)) == 1


def test_overruling_at_random_is_not_trusted():
    assert after(torch.ones(16, dtype=torch.bool)) == pytest.approx(0, abs=0.01)


def test_the_scale_from_doubt_to_random_is_linear():
    """Mean confidence 0.7, in doubt 0.35; overruled are answers of confidence 0.4 and of 0.56."""
    changes = MEMORY * 1.0
    for row, overruled in ((0, 0.40), (4, 0.56)):
        differ = torch.zeros(16, dtype=torch.bool)
        differ[row] = True
        found = (overruled * changes + 0.35) / (changes + 1)
        assert after(differ, 2000) == pytest.approx((0.7 - found) / 0.35, abs=0.01)


def test_one_change_does_not_decide():
    trust = Trust(10)
    trust.add(CONFIDENCES, CONFIDENCES == 1.0)
    assert trust.value == pytest.approx((0.7 - (1.0 + 0.35) / 2) / 0.35)


@pytest.mark.parametrize("classes", [2, 1000])
def test_few_or_many_classes_have_the_same_scale(classes: int):
    """Two classes: no confidence is below a half, and a tie is fully trusted all the same."""
    low = 1 / classes
    sure = torch.linspace(low, 1.0, 16, dtype=torch.float64)
    mean = (low + 1) / 2
    doubt = confidence_in_doubt(mean, classes)
    assert doubt == pytest.approx(0.5 if classes == 2 else mean / 2)
    trust = Trust(classes)
    for _ in range(200):
        trust.add(sure, sure == low)
    assert trust.value == pytest.approx(1, abs=0.01)
    for _ in range(2000):
        trust.add(sure, torch.ones(16, dtype=torch.bool))
    assert trust.value == pytest.approx(0, abs=0.01)


def test_a_source_model_that_knows_nothing_has_no_say():
    trust = Trust(2)
    for _ in range(50):
        trust.add(torch.full((16,), 0.5, dtype=torch.float64), torch.ones(16, dtype=torch.bool))
    assert trust.value == 1


@given(st.lists(st.lists(st.booleans(), min_size=16, max_size=16), max_size=8))
def test_it_is_a_share(looks: list[list[bool]]):
    trust = Trust(10)
    for differ in looks:
        trust.add(CONFIDENCES, torch.tensor(differ))
        assert 0 <= trust.value <= 1
