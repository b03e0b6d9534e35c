"""Each image of a batch once: copies say nothing new, and would outvote all others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetta.core.inputs import Inputs
from moetta.core.step_report import StepReport


@dataclass(frozen=True)
class Once:
    """Which images of a batch stand for which.

    Attributes:
        kept: positions of the images that are left when copies are left out.
        place: for each image of the batch, its row among those; None if there are no copies.
    """

    kept: Tensor | None = None
    place: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs) -> Once:
        """Find the copies."""
        first = first_alike(inputs)
        return cls() if first is None else cls(*first.unique(return_inverse=True))

    def select(self, inputs: Inputs) -> Inputs:
        """The batch, each image once."""
        return inputs if self.kept is None else inputs.select(self.kept)

    def rows(self, values: Tensor) -> Tensor:
        """Values of the images that are left, for the whole batch."""
        return values if self.place is None else values[self.place.to(values.device)]

    def report(self, found: StepReport) -> StepReport:
        """A report about the images that are left, for the whole batch."""
        if self.place is None:
            return found
        return replace(
            found,
            samples=len(self.place),
            entropy=self.rows(found.entropy),
            selected=None if found.selected is None else self.rows(found.selected),
            routing={name: self.rows(experts) for name, experts in found.routing.items()},
        )


def first_alike(inputs: Inputs) -> Tensor | None:
    """For each image the first one that equals it, itself if there is none; None if all differ.

    >>> first_alike(Inputs((torch.tensor([[1.0], [2.0], [1.0]]),), {}))
    tensor([0, 1, 0])
    """
    size = len(inputs)
    sums = inputs.main.detach().reshape(size, -1).sum(1, dtype=torch.float64)
    here = torch.arange(size, device=sums.device)
    first = (sums[:, None] == sums).int().argmax(1)  # the first of several largest values
    later = (first != here).nonzero()[:, 0]
    if not len(later):
        return None
    one, other = inputs.select(first[later]), inputs.select(later)
    same = torch.ones(len(later), dtype=torch.bool, device=sums.device)
    for left, right in zip(one.tensors(), other.tensors(), strict=True):
        if left.dim() and len(left) == len(later):
            same &= (left == right).reshape(len(later), -1).all(1).to(same.device)
    if not same.any():
        return None
    first[later] = torch.where(same, first[later], later)
    return first
