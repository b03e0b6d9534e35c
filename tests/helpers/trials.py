"""One set of trials for all methods: what the contract promises, whatever the model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import moetta
from helpers.models import CLASSES, FAMILIES, VIT, Family, call

METHODS = list(moetta.list_methods())

# Thresholds at which every sample counts, and steps large enough to see; a method takes the fields
# that it has.
EAGER: dict[str, Any] = {
    "lr": 1e-2,
    "e0": 1.5,
    "filter_e0": 1.5,
    "margin": 2.0,
    "plpd": -2.0,
    "recover_below": 0.0,
}

# What a method cannot do, and a part of what it says then.
REFUSED: dict[tuple[str, str], str] = {
    ("deyo", "hf_bert"): r"needs an image batch \[B, C, H, W\]",
}

LEARNS_NOTHING = {"noadapt"}
NOT_THE_SOURCE_AT_START = {"becotta"}  # its adapters start at random values
BATCH_STATISTICS = {"tent", "eata", "cotta", "sar", "deyo", "mgtta"}  # BatchNorms see the batch
MERGES_WITHOUT_NOISE = {"becotta"}  # so the merged model may choose other experts


def pairs(refused: bool = False) -> list[Any]:
    """Every method with every family that it supports (or that it refuses)."""
    return [
        pytest.param(method, family, id=f"{method}-{name}")
        for method in METHODS
        for name, family in FAMILIES.items()
        if ((method, name) in REFUSED) == refused
    ]


def eager(method: str, **changes: Any) -> dict[str, Any]:
    """Settings under which the method learns from every batch."""
    known = {f.name for f in fields(moetta.list_methods()[method].config)}
    return {**{k: v for k, v in EAGER.items() if k in known}, **changes}


def make(
    method: str,
    family: Family = VIT,
    model: nn.Module | None = None,
    inplace: bool = False,
    **changes: Any,
) -> moetta.Adapter:
    """An adapter that learns from every batch, with source images where it needs some."""
    source = None
    if moetta.list_methods()[method].needs_source:
        batches = [family.batch(8, seed) for seed in (101, 102)]
        source = [b if isinstance(b, dict) else b[0] for b in batches]
    model = family.shared() if model is None else model
    return moetta.adapt(model, method, source=source, inplace=inplace, **eager(method, **changes))


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user could see change: values, flags, modes, types, and who is who."""
    return {
        "values": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "flags": {k: p.requires_grad for k, p in model.named_parameters()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in _parameters(model)},
        "modes": {k: m.training for k, m in model.named_modules()},
        "types": {k: type(m) for k, m in model.named_modules()},
        "identities": {k: id(p) for k, p in model.named_parameters()},
    }


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def assert_same(left: Any, right: Any) -> None:
    """Equality to the bit, through dicts."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, Tensor):
        assert isinstance(right, Tensor)
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    else:
        assert left == right


def assert_finite(tensors: dict[str, Tensor]) -> None:
    bad = [k for k, v in tensors.items() if not torch.isfinite(v).all()]
    assert not bad, f"not finite: {bad}"


def learnt(adapter: moetta.Adapter) -> dict[str, Tensor]:
    """The trained parameters, copied."""
    return {k: v for k, v in adapter.state_dict().items() if k.startswith("param.")}


def source_logits(method: str, model: nn.Module, batch: Any) -> Tensor:
    """What the model says before any adaptation, by the model's own code."""
    model = copy.deepcopy(model).eval()
    if method in BATCH_STATISTICS:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
    with torch.no_grad():
        return call(model, batch)


@cache
def plain_run(method: str, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits and final state of two ordinary steps, to compare other ways of calling with."""
    adapter = make(method, FAMILIES[name])
    logits = [call(adapter, FAMILIES[name].batch(4, seed)) for seed in range(2)]
    return logits, adapter.state_dict()


class MethodTrials:
    """The promises of the contract; each takes a method and a family of models."""

    def starts_as_the_source(self, method: str, family: Family) -> None:
        model, batch = family.model().train(), family.batch(4)
        expected = source_logits(method, model, batch)
        logits = call(make(method, family, model), batch)
        if method not in NOT_THE_SOURCE_AT_START:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert logits.shape == (4, CLASSES)

    def learns(self, method: str, family: Family) -> None:
        before = portrait(family.shared())
        adapter = make(method, family)
        start = learnt(adapter)
        for seed in range(3):
            logits = call(adapter, family.batch(4, seed))
            assert torch.isfinite(logits).all()
            assert not logits.requires_grad
            assert not logits.is_inference()
            assert adapter.last is not None
            assert adapter.last.samples == 4
            assert adapter.last.entropy.shape == (4,)
            assert adapter.last.skipped is None
        assert_finite(adapter.state_dict())
        end = learnt(adapter)
        if method not in LEARNS_NOTHING:
            assert [k for k in start if not torch.equal(start[k], end[k])], "no parameter moved"
        totals = adapter.totals
        assert (totals.steps, totals.samples, totals.skipped) == (3, 12, 0)
        assert totals.forwards >= 12
        assert (totals.backwards > 0) == (method not in LEARNS_NOTHING)
        assert_same(before, portrait(family.shared()))

    def resets_exactly(self, method: str, family: Family) -> None:
        adapter = make(method, family)
        initial = adapter.state_dict()
        for seed in (5, 6):
            call(adapter, family.batch(4, seed))
        adapter.reset()
        assert_same(initial, adapter.state_dict())
        assert adapter.last is None
        assert adapter.totals == moetta.Totals()
        self._replays(adapter, method, family)

    def takes_any_batch_size(self, method: str, family: Family) -> None:
        adapter = make(method, family)
        for seed, size in enumerate((1, 4, 3, 1)):
            logits = call(adapter, family.batch(size, seed))
            assert logits.shape == (size, CLASSES)
            assert torch.isfinite(logits).all()
        assert_finite(adapter.state_dict())
        assert adapter.totals.samples == 9

    def ignores_the_callers_grad_mode(self, method: str, family: Family) -> None:
        with torch.inference_mode():
            adapter = make(method, family)
        self._replays(adapter, method, family, modes=(torch.no_grad, torch.inference_mode))
        with torch.inference_mode():
            adapter.snapshot()
            adapter.reset()
            call(adapter, family.batch(4, 0))
            adapter.rollback()
            call(adapter, family.batch(4, 1))
            merged = adapter.merge()
        assert not any(p.is_inference() for p in merged.parameters())
        assert_finite(adapter.state_dict())

    def gives_the_model_back(self, method: str, family: Family) -> None:
        model = family.model().train()
        next(model.parameters()).requires_grad_(False)
        before = portrait(model)
        adapter = make(method, family, model, inplace=True)
        self._replays(adapter, method, family)
        assert adapter.unwrap() is model
        assert_same(before, portrait(model))
        with pytest.raises(RuntimeError, match="unwrapped"):
            call(adapter, family.batch(4))

    def merges(self, method: str, family: Family) -> None:
        adapter = make(method, family)
        call(adapter, family.batch(4, 0))
        state, batch = adapter.state_dict(), family.batch(4, 7)
        with adapter.paused():
            expected = call(adapter, batch)
        merged = adapter.merge()
        assert not any(p.requires_grad for p in merged.parameters())
        frozen = portrait(merged)["values"]
        if method in MERGES_WITHOUT_NOISE:
            expected = call(merged, batch)
            assert torch.isfinite(expected).all()
        assert_same(call(merged, batch), expected)
        assert_same(frozen, portrait(merged)["values"])
        for key, value in adapter.state_dict().items():
            if key != "counters":  # a paused call is counted
                assert_same(value, state[key])
        call(adapter, batch)  # learning on must not reach the merged model
        assert_same(call(merged, batch), expected)

    def _replays(
        self,
        adapter: moetta.Adapter,
        method: str,
        family: Family,
        modes: tuple[Any, Any] = (nullcontext, nullcontext),
    ) -> None:
        """Two steps give what they give in an ordinary run, to the bit."""
        expected, state = plain_run(method, family.name)
        for seed, mode in enumerate(modes):
            with mode():
                logits = call(adapter, family.batch(4, seed))
            assert_same(logits, expected[seed])
            assert not logits.is_inference()
        assert_same(adapter.state_dict(), state)
