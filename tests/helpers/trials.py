"""What the tests of all methods share: settings to learn under, and comparisons."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import moetta
from helpers.models import FAMILIES, VIT, Family, call
from moetta.testing.evidence import portrait

__all__ = ["METHODS", "assert_same", "make", "portrait"]


# Thresholds at which every sample counts, and steps large enough to see; a method takes the fields
# that it has.
EAGER: dict[str, Any] = {
    "lr": 1e-2,
    "e0": 1.5,
    "filter_e0": 1.5,
    "margin": 2.0,
    "plpd": -2.0,
    "recover_below": 0.0,
    "memory": 4,
    "style_warmup": 8,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}

# The models that a method refuses, and a part of the message.
BATCHNORM = {"timm_resnet"}
CLASS_TOKENS = {"timm_vit", "timm_deit", "tv_vit", "hf_vit", "hf_dinov2"}
REFUSED: dict[tuple[str, str], str] = {
    ("deyo", "hf_bert"): r"needs an image batch \[B, C, H, W\]",
    ("roid", "hf_bert"): r"needs an image batch \[B, C, H, W\].*consistency=False",
    ("spa", "hf_bert"): r"needs an image batch \[B, C, H, W\]",
    ("rotta", "hf_bert"): r"needs an image batch \[B, C, H, W\]",
    **{  # DeiT has two heads
        (method, "timm_deit"): "logits are not the output of its last linear layer"
        for method in ("neo", "lame", "gain", "zerosiam", "spa")
    },
    **{(m, "perceptron"): "" for m in ("norm", "alpha_bn", "rem")},
    **{("norm", f): "norm replaces the statistics" for f in FAMILIES.keys() - BATCHNORM},
    **{("alpha_bn", f): "alpha_bn replaces the statistics" for f in FAMILIES.keys() - BATCHNORM},
    **{("rem", f): "rem needs a ViT" for f in FAMILIES.keys() - CLASS_TOKENS},
}

# These answer a batch as a whole, or look at it several times. They go through all trials and
# have tests of their own; tests of the contract's details use the others.
BATCHWISE = {
    "moetta_plus",
    "neo",
    "lame",
    "gain",
    "norm",
    "alpha_bn",
    "roid",
    "rotta",
    "spa",
    "rem",
}
METHODS = [name for name in moetta.list_methods() if name not in BATCHWISE]

ON_A_VIT = [name for name in moetta.list_methods() if (name, VIT.name) not in REFUSED]

LEARNS_NOTHING = {
    m.name for m in moetta.list_methods().values() if m.group in ("baseline", "no-gradient")
}
NOT_THE_SOURCE_AT_START = {
    "becotta",  # its adapters start at random values
    *("neo", "lame", "alpha_bn", "roid", "moetta_plus"),  # these correct the first batch too
    "gain",  # answers log-probabilities
}
SOMETIMES_FINDS_NOTHING = {
    "spa",  # no view may be harder than the image itself
    "roid",  # at such a rate it may soon be equally sure of one class everywhere
}
# BatchNorms see the batch.
BATCH_STATISTICS = {"tent", "eata", "cotta", "sar", "deyo", "mgtta", "norm", "rdumb", "zerosiam"}
BATCH_STATISTICS |= {"spa"}
MERGES_WITHOUT_NOISE = {"becotta"}  # so the merged model may choose other experts


def pairs(refused: bool = False) -> list[Any]:
    """Every method with every family that it supports (or that it refuses)."""
    return [
        pytest.param(method, family, id=f"{method}-{name}")
        for method in moetta.list_methods()
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
