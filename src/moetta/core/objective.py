"""What a method says about one batch: its objective, or what it did."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Objective:
    """What a method wants of one batch; the adapter steps, counts, skips and reports.

    Attributes:
        logits: the prediction [B, C]; what the call returns.
        losses: the terms of the loss by name, each a scalar. Their sum is descended. Without any,
            nothing is differentiated: a method that learns without gradients.
        selected: which samples are learnt from [B]; None means all. Where no sample is selected,
            the batch is skipped.
        entropy: entropy of each sample's prediction [B]; computed from the logits if None.
        forwards: samples forwarded, all passes together; the batch size if None.
        backwards: samples differentiated, all passes together; the selected ones if None.
        running: running values (`Adapter.running`) as they are after this batch. They are taken on
            only if the batch is not skipped.
        skipped: why there is nothing to learn from, or None.
        without_selection: step even if no sample is selected, for loss terms that do not depend on
            the selection.
    """

    logits: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    selected: Tensor | None = None
    entropy: Tensor | None = None
    forwards: int | None = None
    backwards: int | None = None
    running: dict[str, Tensor | None] = field(default_factory=dict)
    skipped: str | None = None
    without_selection: bool = False

    def total(self) -> Tensor:
        """The sum of the loss terms."""
        terms = list(self.losses.values())
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def why_not(self) -> str | None:
        """Why this batch cannot be learnt from, before any gradient is computed; None if it can."""
        if self.skipped is not None:
            return self.skipped
        if self.selected is not None and not self.without_selection and not self.selected.any():
            return "no sample selected"
        values = [t for t in self.running.values() if t is not None and t.is_floating_point()]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            return "non-finite loss or gradient"
        return None


@dataclass
class Step:
    """What a method did with one batch; the adapter turns it into a `StepReport`.

    Only methods that override `Adapter.learn` make one themselves. The fields are those of
    `StepReport`.
    """

    logits: Tensor
    forwards: int = 0
    backwards: int = 0
    entropy: Tensor | None = None
    selected: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    routing: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None
