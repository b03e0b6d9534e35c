"""Batches that say little: every method answers, and what it does not learn from it explains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import FAMILIES, VIT, Family
from helpers.trials import LEARNS_NOTHING, make
from moetta.testing.models import heads

METHODS = list(moetta.list_methods())
STATELESS = {"noadapt", "norm", "alpha_bn"}  # there is nothing that they could have skipped


def family_of(method: str) -> Family:
    return FAMILIES["timm_resnet"] if method in ("norm", "alpha_bn") else VIT


def tied(family: Family) -> nn.Module:
    """Answers every image alike, and no class is likelier than another."""
    return answering(family, torch.zeros(5))


def sure(family: Family) -> nn.Module:
    """Always answers one class, and is quite sure."""
    return answering(family, torch.tensor([1e4, 0, 0, 0, 0]))


def answering(family: Family, bias: Tensor) -> nn.Module:
    model = family.model()
    with torch.no_grad():
        for head in heads(model):
            head.weight.zero_()
            head.bias.copy_(bias)
    return model


def never(family: Family) -> nn.Module:
    """Never answers the first class."""
    model = family.model()
    with torch.no_grad():
        for head in heads(model):
            head.bias[0] = -1e4
    return model


MODELS = {"tied": tied, "sure": sure, "a class never predicted": never}


def learnt(adapter: moetta.Adapter) -> dict[str, Tensor]:
    state = adapter.state_dict().items()
    return {k: v for k, v in state if k != "counters" and not k.startswith("loss.")}


def check(adapter: moetta.Adapter, batch: Tensor) -> None:
    before = learnt(adapter)
    logits = adapter(batch)
    last, after = adapter.last, learnt(adapter)
    assert last is not None
    assert not logits.isnan().any()
    assert all(torch.isfinite(value).all() for value in after.values())
    changed = before.keys() != after.keys() or any(
        not torch.equal(before[name], after[name]) for name in before
    )
    if last.skipped is not None:
        assert last.skipped
        assert last.backwards == 0
        moved = [
            k for k in before if k.startswith("param.") and not torch.equal(before[k], after[k])
        ]
        assert not moved
    elif adapter.method not in STATELESS | {"lame"}:
        # SAR may step and start over in one go; then the counter tells.
        assert changed or last.backwards > 0


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_single_images_and_copies(method: str, eager: bool) -> None:
    family = family_of(method)
    (one,) = family.batch(1, 0)  # type: ignore[misc]
    for batch in (one, one.expand(4, -1, -1, -1).contiguous()):  # type: ignore[union-attr]
        adapter = make(method, family) if eager else defaults(method, family)
        for _ in range(2):
            check(adapter, batch)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_predictions_that_are_tied_or_leave_a_class_out(
    method: str, eager: bool, model: str
) -> None:
    family = family_of(method)
    made = MODELS[model](family)
    adapter = make(method, family, made) if eager else defaults(method, family, made)
    for seed in range(3):
        check(adapter, family.batch(4, seed)[0])  # type: ignore[index]


def defaults(method: str, family: Family, model: nn.Module | None = None) -> moetta.Adapter:
    """The method as it comes."""
    found = moetta.list_methods()[method]
    pixels = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    settings = pixels if "mean" in found.config.field_docs() else {}
    source = [family.batch(8, 101)[0]] if found.needs_source else None  # type: ignore[index]
    model = family.shared() if model is None else model
    return moetta.adapt(model, method, source=source, **settings)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in STATELESS])
def test_features_that_are_not_finite_are_not_learnt_from(method: str) -> None:
    """The images are finite, but so large that no model can answer."""
    family = family_of(method)
    adapter = make(method, family)
    adapter(family.batch(4, 0)[0])  # type: ignore[index]
    before = learnt(adapter)
    adapter(family.batch(4, 1)[0] * 1e30)  # type: ignore[index]
    assert adapter.last is not None
    assert adapter.last.skipped
    assert adapter.last.backwards == 0
    after = learnt(adapter)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_methods_that_learn_nothing_are_those_that_say_so() -> None:
    assert STATELESS | {"neo", "lame", "gain"} == LEARNS_NOTHING
