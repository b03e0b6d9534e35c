"""The guard in small worlds: hostile traffic, few and many classes, any method."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import VIT
from helpers.trials import make

# Two more need BatchNorm.
LEARNING = [m for m in moetta.list_methods() if m not in ("noadapt", "norm", "alpha_bn")]


@pytest.fixture(scope="module")
def worlds() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "guard_worlds.py"
    spec = importlib.util.spec_from_file_location("guard_worlds", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["guard_worlds"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def gains(worlds: ModuleType, source: tuple, stream: str, lr: float) -> tuple[float, float, float]:
    return worlds.gains(worlds.world(*source, stream), stream, "tent", lr)[:3]


@pytest.mark.parametrize("lr", [0.1, 1.0])
@pytest.mark.parametrize("source", [(2, 0.5, 3.0), (10, 1.0, 2.0), (100, 1.5, 1.3)])
def test_long_bursts_of_one_class(worlds: ModuleType, source: tuple, lr: float):
    """The worst label shift: sorted by class. Plain Tent collapses into the present class."""
    _, plain, guarded = gains(worlds, source, "bursts", lr)
    assert plain < -5
    assert guarded > -1.5


@pytest.mark.parametrize("stream", ["mixed", "batch-4", "noise", "constant"])
def test_rates_that_destroy_the_model(worlds: ModuleType, stream: str):
    _, plain, guarded = gains(worlds, (10, 1.5, 2.0), stream, 0.5)
    assert plain < -20
    assert guarded > -1.5


def test_a_short_stream(worlds: ModuleType):
    """Twenty batches: there is no time to wait for an alarm."""
    _, plain, guarded = gains(worlds, (10, 1.5, 2.0), "short", 1.0)
    assert plain < -10
    assert guarded > -2.5


def test_a_source_model_that_is_nearly_always_right(worlds: ModuleType):
    for lr in (0.01, 1.0):
        source, _, guarded = gains(worlds, (10, 1.5, 0.8), "mixed", lr)
        assert source > 98
        assert guarded > -0.5


def test_healthy_learning_is_left_alone(worlds: ModuleType):
    """A thousand classes; the gain is kept whole, at a quarter of a forward pass per image."""
    found = worlds.world(1000, 2.0, 0.9, "mixed")
    _, plain, guarded, guard = worlds.gains(found, "mixed", "tent", 0.01)
    assert plain > 0
    assert guarded >= 0.95 * plain
    assert not guard.events
    assert guard.totals.forwards < 1.45 * 6400  # with the probation of 1,024 images


class Other(nn.Module):
    """A model that agrees with nobody."""

    def forward(self, batch: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(1e4 * batch.sum().abs()) % 1000)
        return 9 * torch.randn(len(batch), VIT.shared()(batch[:1]).shape[1], generator=generator)


@pytest.mark.parametrize("method", LEARNING)
def test_any_method_is_stopped_and_resumes(method: str):
    guard = moetta.Guard(make(method), cooldown=48)
    like = guard.reference._model
    guard.reference._model = Other()  # whatever the method does now looks like harm
    for seed in range(12):
        assert torch.isfinite(guard(VIT.batch(16, seed)[0])).all()
    assert guard.counts["rollback"] + guard.counts["reset"] >= 1
    guard.reference._model = like
    before = guard.counts["resume"]
    for seed in range(40):
        assert torch.isfinite(guard(VIT.batch(16, 100 + seed)[0])).all()
        if guard.counts["resume"] > before:
            return
    raise AssertionError(f"{method} is held for ever: {guard.events}")
