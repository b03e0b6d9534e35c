"""Merging what several replicas of one adapter have learnt; plain maths on their states.

All replicas start from the same state, the *base*, and learn from different images. Each gives its
state and how many images it has learnt from since; `merge` makes one state of them, in one of
these ways:

- "images": the mean, weighted by the images that each replica has learnt from.
- "experts": the same, but the tensors of an expert are weighted by the images that this expert saw.
- "equal": the plain mean.
- "sum": the base plus what each replica has changed.

The service uses "images". A loss is a mean over a replica's images, so an expert that few of them
used has moved little already; a mean by all images then gives what one server would have done with
all of them, exactly so if they are merged after every update. Weights by expert would let an expert
that one of two replicas used move twice as far. benchmarks/merge.py compares all four.

With "experts" and "sum", an expert that nobody used stays as it was in the base. Momentum is a mean
in every way, since its size does not grow with the number of steps; so are moving averages
(entropies, class probabilities, teachers). Counters add up. The largest step count of an
optimiser is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter
    from moetta.core.step_report import StepReport

State = dict[str, Tensor]
How = Literal["sum", "experts", "images", "equal"]

ADDED = frozenset({"running.batches", "running.count", "counters"})
"""What grows with every batch: merged by adding."""
AVERAGED = (
    "anchor.",
    "average_loss",
    "entropy",
    "fisher.",
    "mean",
    "noise",
    "probability",
    "source_",
    "teacher.",
    "threshold",
    "variance",
)
"""How the names of running values begin that a mean makes sense for."""


@dataclass(frozen=True)
class Contribution:
    """What one replica has learnt since the base.

    Attributes:
        state: its adapter's state.
        images: images it has learnt from.
        experts: for each layer with experts, the images that each of them saw [E].
    """

    state: State
    images: float
    experts: Mapping[str, Tensor] = field(default_factory=dict)


class Tally:
    """Counts images and experts' images, update by update."""

    def __init__(self) -> None:
        self.updates = 0
        self.images = 0
        self.experts: dict[str, Tensor] = {}

    def add(self, report: StepReport, expert_counts: Mapping[str, int]) -> None:
        """Count one step; images that the method did not select do not count."""
        if report.skipped is not None:
            return
        chosen = report.selected
        self.updates += 1
        self.images += report.samples if chosen is None else int(chosen.sum())
        for layer, experts in report.routing.items():
            if layer in expert_counts:
                seen = experts if chosen is None else experts[chosen.to(experts.device)]
                count = torch.bincount(seen.flatten().cpu(), minlength=expert_counts[layer])
                self.experts[layer] = self.experts.get(layer, torch.zeros_like(count)) + count


def why_not(adapter: Adapter) -> str | None:
    """Why states of this adapter cannot be merged, or None if they can."""
    if adapter.resets is not None:
        return "it starts over by its own schedule, which replicas would not share"
    if getattr(adapter.config, "threshold", None) == "aliased":
        return "the threshold of the authors' code is not a mean; leave the preset 'released' out"
    for name in adapter.running:
        if f"running.{name}" not in ADDED and not name.startswith(AVERAGED):
            return f"its running value {name!r} cannot be averaged"
    return None


def merge(base: State, contributions: Sequence[Contribution], how: How = "images") -> State:
    """One state from several that started at ``base``.

    Args:
        base: the state that all of them started from.
        contributions: what each has learnt since. Those without images, or with parameters that
            are not finite, have no say.
        how: see the module's text.

    Raises:
        ValueError: tensors of one name differ in shape.
    """
    given = [c for c in contributions if c.images > 0 and _finite(c.state)]
    if not given:
        return {key: value.clone() for key, value in base.items()}
    keys = dict.fromkeys([*base, *(key for c in given for key in c.state)])
    merged = {}
    for key in keys:
        values = [c.state.get(key) for c in given]
        found = [value for value in values if value is not None]
        if not found:
            merged[key] = base[key].clone()
            continue
        if len({value.shape for value in (*found, base.get(key, found[0]))}) != 1:
            raise ValueError(f"{key} has different shapes in the states to merge")
        start = base.get(key)
        if key in ADDED or key.startswith("loss."):
            merged[key] = _sum(start, found)
        elif key.endswith(".step"):
            merged[key] = torch.stack(found).amax(0)
        elif not found[0].is_floating_point():
            merged[key] = found[0].clone()
        else:
            here = [c for c, value in zip(given, values, strict=True) if value is not None]
            weights = _weights(key, here, found[0], how)
            if how == "sum" and key.startswith("param."):
                merged[key] = _rows(weights, _sum(start, found), start)
            else:
                merged[key] = _mean(start, found, weights)
    return merged


def _finite(state: State) -> bool:
    return all(
        bool(torch.isfinite(value).all())
        for key, value in state.items()
        if key.startswith("param.")
    )


def _sum(base: Tensor | None, values: list[Tensor]) -> Tensor:
    start = torch.zeros_like(values[0]) if base is None else base
    total = start.double() + sum(value.double() - start.double() for value in values)
    return total.to(values[0].dtype)


def _mean(base: Tensor | None, values: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = torch.stack(weights).sum(0)
    # Float64 makes the mean of equal float32 values exactly that value.
    shares = [weight / total.clamp(min=1e-300) for weight in weights]
    mean = sum(
        (value.double() * share for value, share in zip(values, shares, strict=True)),
        start=torch.zeros_like(values[0], dtype=torch.float64),
    )
    return _rows(weights, mean.to(values[0].dtype), values[0] if base is None else base)


def _rows(weights: list[Tensor], merged: Tensor, base: Tensor | None) -> Tensor:
    """The merged tensor; rows of no weight stay as they were."""
    return merged if base is None else torch.where(torch.stack(weights).sum(0) > 0, merged, base)


def _weights(
    key: str, contributions: Sequence[Contribution], like: Tensor, how: How
) -> list[Tensor]:
    """The weight of each contribution for one tensor, in a shape that multiplies it."""
    if how == "equal":
        return [torch.ones((), dtype=torch.float64) for _ in contributions]
    if how in ("experts", "sum"):
        sizes = {layer: len(n) for c in contributions for layer, n in c.experts.items()}
        for layer, size in sizes.items():
            if is_expert(key, like, layer, size):
                shape = (-1,) + (1,) * (like.dim() - 1)
                zero = torch.zeros(size)
                return [c.experts.get(layer, zero).double().view(shape) for c in contributions]
    return [torch.tensor(float(c.images), dtype=torch.float64) for c in contributions]


def is_expert(key: str, value: Tensor, layer: str, experts: int) -> bool:
    """Whether a state's tensor holds one row per expert of a layer; a router's rows do not count.

    >>> is_expert("param.blocks.0.norm1.expert_weight", torch.zeros(9, 4), "blocks.0.norm1", 9)
    True
    >>> is_expert("param.blocks.0.norm1.router.weight", torch.zeros(9, 4), "blocks.0.norm1", 9)
    False
    """
    kind, _, name = key.partition(".")
    rest = name.removeprefix(f"{layer}.")
    return (
        kind in ("param", "optim")
        and rest != name
        and not rest.startswith(("router", "gate"))
        and value.dim() > 0
        and len(value) == experts
    )


def rebase(merged: State, contributed: State, current: State) -> State:
    """The merged state plus what was learnt between contributing and receiving it.

    Parameters, counters and sums keep the difference; running averages and momentum are the merged
    ones, since the few steps in between say little about them.
    """
    out = {}
    for key, value in merged.items():
        kept = key.startswith(("param.", "loss.")) or key in ADDED
        if kept and key in contributed and key in current:
            difference = current[key].double() - contributed[key].double()
            out[key] = (value.double() + difference).to(value.dtype)
        else:
            out[key] = value.clone()
    return out
