"""The matrix: every method through the same trials on every family of models."""

from __future__ import annotations

import pytest

from helpers.models import Family, call
from helpers.trials import REFUSED, MethodTrials, assert_same, make, pairs, portrait

matrix = pytest.mark.parametrize(("method", "family"), pairs())


@matrix
class TestMatrix(MethodTrials):
    def test_starts_as_the_source(self, method: str, family: Family) -> None:
        self.starts_as_the_source(method, family)

    def test_learns(self, method: str, family: Family) -> None:
        self.learns(method, family)

    def test_resets_exactly(self, method: str, family: Family) -> None:
        self.resets_exactly(method, family)

    def test_takes_any_batch_size(self, method: str, family: Family) -> None:
        self.takes_any_batch_size(method, family)

    def test_ignores_the_callers_grad_mode(self, method: str, family: Family) -> None:
        self.ignores_the_callers_grad_mode(method, family)

    def test_gives_the_model_back(self, method: str, family: Family) -> None:
        self.gives_the_model_back(method, family)

    def test_merges(self, method: str, family: Family) -> None:
        self.merges(method, family)


@pytest.mark.parametrize(("method", "family"), pairs(refused=True))
def test_refuses_what_it_cannot_do(method: str, family: Family) -> None:
    model = family.model()
    before = portrait(model)
    with pytest.raises(ValueError, match=REFUSED[method, family.name]):
        call(make(method, family, model, inplace=False), family.batch(4))
    assert_same(before, portrait(model))
