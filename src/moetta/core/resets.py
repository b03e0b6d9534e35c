"""When an adapter starts over from the source model: after a while, or when answers concentrate.

A policy wraps any method. A fixed interval is RDumb's (Press et al., 2023). ASR looks at how
concentrated the answers are, resets the deep layers first, and remembers where important
parameters were (2026).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from moetta.core.teacher import holding
from moetta.suggest import nearest

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter
    from moetta.core.inputs import Inputs
    from moetta.core.objective import Step

POLICY = "reset."  # how the names of a policy's running values begin


class Policy(Protocol):
    """What an adapter asks of a reset policy."""

    def before(self) -> None:
        """A batch is about to be learnt from."""

    def along(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients to step along, in place of the method's own."""

    def after(self, inputs: Inputs, step: Step) -> None:
        """The batch was answered and, unless the step was skipped, learnt from."""


@dataclass(frozen=True)
class ASRValues:
    """ASR's constants.

    Attributes:
        follow: how slowly the threshold follows the concentration (m0).
        pull: weight of the pull to remembered values (p0).
        start: the threshold starts at the entropy of this share of the classes (a0).
        keep: share of the tensors that the mildest reset keeps (r0).
        steepness: how fast that share falls with the drop below the threshold (r1).
    """

    follow: float
    pull: float
    start: float
    keep: float
    steepness: float

    def moved(self, threshold: float, now: float, flipped: float) -> float:
        """The threshold after a batch whose answers differ from the source's in this share."""
        slow = self.follow * flipped + 1 - self.follow
        return slow * threshold + (1 - slow) * now

    def kept(self, drop: float, count: int) -> int:
        """How many of so many tensors stay, from the first on, at a drop below the threshold."""
        share = max(self.keep - self.steepness * drop, 0.0)
        return math.ceil(round(share * count, 9))


ASR = {
    "asr": ASRValues(0.99, 5.0, 0.005, 0.5, 50.0),
    "asr-resnet": ASRValues(0.15, 5.0, 0.5, 0.5, 20.0),
    "asr-roid": ASRValues(0.9, 5.0, 0.0005, 0.5, 0.1),
    "asr-ccc0": ASRValues(0.9995, 5.0, 0.005, 0.5, 0.1),
    "asr-roid-ccc0": ASRValues(0.999, 5.0, 0.0005, 0.5, 0.1),
    "asr-roid-ccc40": ASRValues(0.9, 5.0, 0.0005, 0.5, 20.0),
}
"""The authors' values: for a ViT with ETA, for a ResNet-50, for a ViT with ROID.

The last three are for a ViT where the authors have others on a level of CCC, their benchmark of
continually changing corruptions: on CCC-0 with ETA and with ROID, on CCC-40 with ROID.
"""


def check_reset(value: int | str | None) -> None:
    """Refuse what is not a policy."""
    if isinstance(value, str):
        if value not in ASR:
            raise ValueError(f"no reset policy {value!r}; {nearest(value, ASR)}")
    elif value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"reset must be at least 1 batch, {', '.join(ASR)} or None, got {value!r}")


def make_policy(adapter: Adapter[Any]) -> Policy | None:
    """The policy that an adapter's configuration asks for."""
    wanted = adapter.config.reset
    if wanted is None:
        return None
    if isinstance(wanted, str):
        return Concentration(adapter, ASR[wanted])
    return Interval(adapter, wanted)


class Interval:
    """Starts over every so many batches."""

    def __init__(self, adapter: Adapter[Any], batches: int) -> None:
        self.adapter, self.batches = adapter, batches

    def before(self) -> None:
        """Start over if it is time."""
        if self.adapter.steps and self.adapter.steps % self.batches == 0:
            self.adapter.start_over()

    def along(self, grads: list[Tensor]) -> list[Tensor]:
        """The method's own."""
        return grads

    def after(self, inputs: Inputs, step: Step) -> None:
        """Nothing."""


def concentration(logits: Tensor) -> float:
    """Entropy of the mean prediction of a batch: the lower, the fewer classes are answered.

    >>> round(concentration(torch.tensor([[3.0, 1.0, 0.0, 0.0]])), 6)
    0.672078
    """
    p = logits.float().mean(0).log_softmax(-1)
    return float(-(p.exp() * p).sum())


class Concentration:
    """ASR: starts over, more or less, when the answers concentrate on few classes.

    Each batch costs one more forward pass, of the source model.
    """

    def __init__(self, adapter: Adapter[Any], values: ASRValues) -> None:
        if not adapter.trained:
            raise ValueError(
                f"{adapter.method} trains nothing that could be reset; leave reset= out"
            )
        self.adapter, self.values = adapter, values
        running = adapter.running
        running |= dict.fromkeys(f"{POLICY}{n}" for n in ("threshold", "weight", "count"))
        for kind in ("squares", "sums", "importance", "centre"):
            running |= dict.fromkeys(f"{POLICY}{kind}.{name}" for name in adapter.trained)

    def before(self) -> None:
        """Nothing."""

    @torch.no_grad()
    def along(self, grads: list[Tensor]) -> list[Tensor]:
        """The method's gradients, plus the pull to where important parameters were."""
        running, found = self.adapter.running, []
        weight = running[f"{POLICY}weight"]
        for (name, parameter), grad in zip(self.adapter.trained.items(), grads, strict=True):
            for kind, value in (("squares", grad**2), ("sums", parameter)):
                key = f"{POLICY}{kind}.{name}"
                before = running[key]
                running[key] = value.clone() if before is None else before + value
            importance = running[f"{POLICY}importance.{name}"]
            centre = running[f"{POLICY}centre.{name}"]
            if weight is not None and importance is not None and centre is not None:
                grad = grad + 2 * weight * importance * (parameter - centre)
            found.append(grad)
        count = running[f"{POLICY}count"]
        one = torch.ones((), device=self.adapter.device)
        running[f"{POLICY}count"] = one if count is None else count + one
        return found

    @torch.no_grad()
    def after(self, inputs: Inputs, step: Step) -> None:
        """Move the threshold, or start over."""
        adapter, values, running = self.adapter, self.values, self.adapter.running
        logits = step.logits.detach()
        source = self._source_logits(inputs)
        step.forwards += len(inputs)
        if not torch.isfinite(logits).all():
            return
        flipped = float((logits.argmax(-1) != source.argmax(-1)).float().mean())
        now, start = concentration(logits), math.log(values.start * logits.shape[1])
        before = running[f"{POLICY}threshold"]
        threshold = start if before is None else float(before)
        if now < threshold:
            self._remember()
            adapter.start_over(values.kept(threshold - now, len(adapter.trained)))
            threshold = start
        else:
            threshold = values.moved(threshold, now, flipped)
        at = logits.device
        running[f"{POLICY}threshold"] = torch.tensor(threshold, dtype=torch.float64, device=at)
        weight = values.pull * flipped**2
        running[f"{POLICY}weight"] = torch.tensor(weight, dtype=torch.float32, device=at)

    def _source_logits(self, inputs: Inputs) -> Tensor:
        adapter = self.adapter
        start = list(adapter.at_start().values())
        with holding(list(adapter.trained.values()), start):
            return inputs.logits(adapter.model)

    def _remember(self) -> None:
        """Keep the average importance and place of every parameter since the last reset."""
        running = self.adapter.running
        count = running[f"{POLICY}count"]
        if count is None:  # no step since the last reset
            return
        for name in self.adapter.trained:
            for kind, into in (("squares", "importance"), ("sums", "centre")):
                total, key = running[f"{POLICY}{kind}.{name}"], f"{POLICY}{into}.{name}"
                assert total is not None
                mean, before = total / count, running[key]
                running[key] = mean if before is None else 0.9 * before + 0.1 * mean
                running[f"{POLICY}{kind}.{name}"] = None
        running[f"{POLICY}count"] = None
