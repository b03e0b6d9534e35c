from __future__ import annotations

import math

import pytest
import torch

from moetta import StepReport, Totals


def report(**changes: object) -> StepReport:
    values = {
        "samples": 3,
        "forwards": 6,
        "backwards": 2,
        "entropy": torch.tensor([0.5, 1.0, 0.25]),
    }
    return StepReport(**{**values, **changes})


def test_totals_add_up() -> None:
    totals = Totals()
    totals = totals.plus(report(losses={"a": 1.5}, selected=torch.tensor([True, False, False])))
    totals = totals.plus(report(losses={"a": 0.5, "b": 2.0}, skipped="because"))
    assert totals == Totals(
        steps=2,
        samples=6,
        forwards=12,
        backwards=4,
        selected=3,  # one that was chosen, two differentiated where nothing chooses
        skipped=1,
        entropy=3.5,
        losses={"a": 2.0, "b": 2.0},
    )


def test_totals_do_not_change_in_place() -> None:
    first = Totals().plus(report(losses={"a": 1.0}))
    first.plus(report(losses={"a": 1.0}))
    assert first.losses == {"a": 1.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_step_does_not_spoil_the_totals(bad: float) -> None:
    spoilt = report(entropy=torch.tensor([0.5, bad, 0.25]), losses={"a": bad})
    totals = Totals().plus(spoilt).plus(report(losses={"a": 1.0}))
    assert totals.entropy == 2.5
    assert totals.losses == {"a": 1.0}
