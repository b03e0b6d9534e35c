"""What a trial sees: whether a promise was kept, and if not, how it was broken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter


class Broken(AssertionError):
    """One promise is broken; the message says what was seen."""


def require(ok: bool, seen: str) -> None:
    """Say that the promise is broken unless ``ok``."""
    if not ok:
        raise Broken(seen)


def same(left: Any, right: Any, what: str) -> None:
    """Say that the promise is broken unless both are equal to the bit."""
    if seen := difference(left, right, what):
        raise Broken(seen)


def difference(left: Any, right: Any, what: str) -> str | None:
    """How two tensors, or nested dicts of them, differ, in words; None if they do not.

    >>> difference({"a": torch.zeros(2)}, {"a": torch.ones(2)}, "the state")
    'the state: a differs by up to 1'
    """
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            names = ", ".join(sorted(map(str, left.keys() ^ right.keys()))[:3])
            return f"{what}: only one has {names}"
        pairs = ((key, difference(left[key], right[key], "")) for key in left)
        found = [f"{key}{seen}" for key, seen in pairs if seen]
        return f"{what}: {'; '.join(found[:3])}" if found else None
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"{what} is {tuple(left.shape)} {left.dtype}, not {right.shape} {right.dtype}"
        gap = (left.double() - right.double()).abs().nan_to_num(torch.inf)
        alike = (left == right) | (left.isnan() & right.isnan())
        return None if alike.all() else f"{what} differs by up to {gap[~alike].max():.3g}"
    return None if left == right else f"{what} is {left}, not {right}"


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user could see change: values, flags, modes, types, and which object is where."""
    named = dict(model.named_parameters())
    return {
        "values": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "flags": {k: p.requires_grad for k, p in named.items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in named.items()},
        "modes": {k: m.training for k, m in model.named_modules()},
        "types": {k: type(m) for k, m in model.named_modules()},
        "identities": {k: id(p) for k, p in named.items()},
    }


def trained(adapter: Adapter) -> dict[str, Tensor]:
    """Copies of the trained parameters."""
    return {k: v for k, v in adapter.state_dict().items() if k.startswith("param.")}


def learnt(adapter: Adapter) -> dict[str, Tensor]:
    """Copies of the whole state but the counters, which count every call."""
    state = adapter.state_dict().items()
    return {k: v for k, v in state if k != "counters" and not k.startswith("loss.")}


def finite(adapter: Adapter) -> None:
    """Say that the promise is broken unless all of the state is finite."""
    bad = [k for k, v in adapter.state_dict().items() if not torch.isfinite(v).all()]
    require(not bad, f"the state is not finite: {', '.join(bad[:3])}")
