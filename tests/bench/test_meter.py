"""What is measured: each figure against one worked out by hand."""

from __future__ import annotations

import math

import polars as pl
import pytest
import torch

from moetta import StepReport
from moetta.bench import run_folder
from moetta.bench.meter import Meter, Scored, mean_cosine


def report(samples: int, **fields: object) -> StepReport:
    values = {"forwards": samples, "backwards": samples, "entropy": torch.ones(samples), **fields}
    return StepReport(samples=samples, **values)  # type: ignore[arg-type]


def logits_for(probabilities: list[list[float]]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_calibration_error_by_hand() -> None:
    meter = Meter(["a"], 1)
    # Confidences 0.9 (right), 0.9 (wrong), 0.6 (right): two bins.
    logits = logits_for([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    labels = torch.tensor([0, 1, 1])
    meter.add(Scored(0, torch.zeros(3, dtype=torch.long), labels, logits, report(3), 0.1))
    expected = (2 / 3) * abs(0.9 - 0.5) + (1 / 3) * abs(0.6 - 1.0)
    assert meter.calibration_error() == pytest.approx(expected, abs=1e-6)


def test_counts_by_domain_and_quarter() -> None:
    meter = Meter(["a", "b"], 4)
    logits = torch.eye(3)[[0, 1, 2, 0]]  # predicts 0, 1, 2, 0
    domains = torch.tensor([0, 0, 1, 1])
    meter.add(Scored(0, domains, torch.tensor([0, 1, 0, 0]), logits, report(4), 0.1))
    meter.add(Scored(3, domains, torch.tensor([1, 1, 2, 2]), logits, report(4), 0.1))
    assert meter.counts[:, 0].tolist() == [[2, 2], [2, 1]]
    assert meter.counts[:, 3].tolist() == [[2, 1], [2, 1]]
    assert meter.counts[:, 1:3].sum() == 0
    frame = run_folder.domains_frame(meter)
    assert frame.filter(pl.col("quarter") == 3)["correct"].to_list() == [1, 1]


def test_top_five_counts_the_five_likeliest() -> None:
    meter = Meter(["a"], 1)
    logits = torch.arange(8.0).expand(2, 8)  # 7, 6, 5, 4, 3 are the likeliest
    labels = torch.tensor([3, 2])
    meter.add(Scored(0, torch.zeros(2, dtype=torch.long), labels, logits, report(2), 0.1))
    assert int(meter.top5) == 1
    few = Meter(["a"], 1)
    scored = Scored(0, torch.zeros(1, dtype=torch.long), torch.tensor([1]), torch.eye(3)[:1],
                    report(1), 0.1)  # fmt: skip
    few.add(scored)
    assert int(few.top5) == 1


def test_routing_counts_every_expert_even_if_unused() -> None:
    meter = Meter(["a", "b"], 4, experts=3)
    routing = {"one": torch.tensor([[0], [1], [1]]), "two": torch.tensor([[1], [1], [1]])}
    domains, labels = torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.long)
    meter.add(Scored(3, domains, labels, torch.eye(3), report(3, routing=routing), 0.1))
    frame = run_folder.experts_frame(meter, ["one", "two"])
    assert frame["count"].sum() == 6
    assert len(frame) == 4 * 2 * 2 * 3
    last = frame.filter((pl.col("step_bucket") == 3) & (pl.col("layer") == "one"))
    assert last.filter(pl.col("domain") == "a")["count"].to_list() == [1, 1, 0]
    assert last.filter(pl.col("domain") == "b")["count"].to_list() == [0, 1, 0]


def test_loss_terms_that_appear_late() -> None:
    meter = Meter(["a"], 2)
    zero = torch.zeros(1, dtype=torch.long)
    meter.add(Scored(0, zero, zero, torch.eye(2)[:1], report(1), 0.1))
    meter.add(Scored(1, zero, zero, torch.eye(2)[:1], report(1, losses={"x": 2.0}), 0.1))
    assert run_folder.steps_frame(meter)["loss_x"].to_list() == [None, 2.0]


def test_state_survives() -> None:
    meter, zero = Meter(["a"], 2, experts=2), torch.zeros(1, dtype=torch.long)
    full = report(1, losses={"x": 1 / 3}, routing={"l": torch.tensor([[1]])})
    meter.add(Scored(0, zero, zero, torch.randn(1, 7), full, 0.1, torch.randn(1, 7), 0.2))
    other = Meter(["a"], 2, experts=2)
    other.restore(meter.tensors())
    assert other.columns == meter.columns
    assert list(other.columns) == list(meter.columns)
    assert all(torch.equal(a, meter.tensors()[k]) for k, a in other.tensors().items())


def test_mean_cosine_leaves_out_unused_experts() -> None:
    assert mean_cosine(torch.tensor([[1.0, 0], [-1, 0], [0, 0]])) == pytest.approx(-1)
    assert math.isnan(mean_cosine(torch.tensor([[1.0, 0], [0, 0]])))


@pytest.mark.parametrize(
    ("ours", "theirs", "step"),
    [
        ([1, 1, 1], [0, 0, 0], 0),
        ([0, 2, 1], [1, 0, 0], 1),
        ([2, 0, 3], [1, 2, 1], 2),
        ([3, 0, 0], [1, 1, 1], None),
        ([1, 1, 1], [1, 1, 1], None),
        ([1, 1, 1], [None, None, None], None),
    ],
)
def test_first_gain(ours: list[int], theirs: list[int | None], step: int | None) -> None:
    schema = {"step": pl.Int64, "correct": pl.Int64, "correct_noadapt": pl.Int64}
    columns = {"step": [0, 1, 2], "correct": ours, "correct_noadapt": theirs}
    assert run_folder.first_gain(pl.DataFrame(columns, schema=schema)) == step


def test_collapse_is_below_half_in_the_last_quarter() -> None:
    def paired(ours: int, theirs: int) -> torch.Tensor:
        out = torch.zeros(1, 4, 3, dtype=torch.int64)
        out[0, 0] = torch.tensor([100, 90, 50])
        out[0, 3] = torch.tensor([100, ours, theirs])
        return out

    assert run_folder.collapsed(paired(24, 50))
    assert not run_folder.collapsed(paired(25, 50))
    assert not run_folder.collapsed(torch.zeros(1, 4, 3, dtype=torch.int64))
