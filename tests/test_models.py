"""The matrix: every method through the same trials on every family of models."""

from __future__ import annotations

import pytest
import torch

from helpers.models import CLASSES, Family, call
from helpers.trials import (
    LEARNS_NOTHING,
    MERGES_WITHOUT_NOISE,
    NOT_THE_SOURCE_AT_START,
    REFUSED,
    SOMETIMES_FINDS_NOTHING,
    assert_same,
    eager,
    make,
    pairs,
    source_logits,
)
from moetta.testing import check_method

matrix = pytest.mark.parametrize(("method", "family"), pairs())


@matrix
def test_keeps_every_promise(method: str, family: Family) -> None:
    outcomes = check_method(method, [family], **eager(method))
    assert len(outcomes) > 10
    assert not any(outcome.refused for outcome in outcomes)


@matrix
def test_learns_from_every_batch(method: str, family: Family) -> None:
    adapter = make(method, family)
    for seed in range(3):
        call(adapter, family.batch(4, seed))
        if method not in SOMETIMES_FINDS_NOTHING:
            assert adapter.last.skipped is None
    learns = method not in LEARNS_NOTHING
    assert (adapter.totals.backwards > 0) == bool(adapter.trained) == learns


@matrix
def test_starts_as_the_source_model(method: str, family: Family) -> None:
    model, batch = family.model().train(), family.batch(4)
    expected = source_logits(method, model, batch)
    logits = call(make(method, family, model), batch)
    assert logits.shape == (4, CLASSES)
    if method not in NOT_THE_SOURCE_AT_START:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@matrix
def test_a_merged_model_answers_as_the_adapter_does(method: str, family: Family) -> None:
    adapter = make(method, family)
    call(adapter, family.batch(4, 0))
    with adapter.paused():
        expected = call(adapter, family.batch(4, 7))
    with torch.inference_mode():
        merged = adapter.merge()
    assert not any(p.is_inference() for p in merged.parameters())
    answer = call(merged, family.batch(4, 7))
    assert torch.isfinite(answer).all()
    if method not in MERGES_WITHOUT_NOISE:
        assert_same(answer, expected)


@pytest.mark.parametrize(("method", "family"), pairs(refused=True))
def test_refuses_what_it_cannot_do(method: str, family: Family) -> None:
    (outcome,) = check_method(method, [family], **eager(method))
    assert outcome.broken is None
    with pytest.raises(ValueError, match=REFUSED[method, family.name]):
        call(make(method, family), family.batch(4))
