"""A leash for experts: how far and how fast they may move away from the source model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leash:
    """Bounds on experts' offsets, tensors [E, D] that are zero in the source model.

    An expert's distance is the joint norm of its offsets in all layers, and is measured against the
    norm of the layers' own scales, so that a bound means the same for models of any size.

    Attributes:
        scale: norm of the layers' own scales.
        radius: largest distance from the source model, as a share of ``scale``; 0 sets no limit.
        stride: largest distance covered in one step, as a share of ``scale``; 0 sets no limit.
        pull: share of its offset that an expert gives back in each step.
    """

    scale: Tensor
    radius: float
    stride: float
    pull: float

    @torch.no_grad()
    def braked(self, offsets: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, weaker the further an expert has gone: none are left at the radius."""
        if not self.radius:
            return list(grads)
        part = (_length(offsets) / (self.radius * self.scale)).clamp(max=1)
        left = (1 - part.square())[:, None]
        return [grad * left for grad in grads]

    @torch.no_grad()
    def hold(self, offsets: Sequence[Tensor], before: Sequence[Tensor], portion: float) -> None:
        """Shorten the step just taken, pull every expert back a little, keep it in the radius.

        Args:
            offsets: after the step; changed in place.
            before: the same before the step.
            portion: the batch's size as a share of a full one; smaller steps for smaller batches.
        """
        if self.stride:
            steps = [after - start for after, start in zip(offsets, before, strict=True)]
            short = _at_most(self.stride * portion * self.scale, _length(steps))
            for offset, start, step in zip(offsets, before, steps, strict=True):
                offset.copy_(start + short * step)
        keep = torch.full_like(offsets[0][:, :1], 1 - self.pull * portion)
        if self.radius:
            keep = keep.minimum(_at_most(self.radius * self.scale, _length(offsets)))
        for offset in offsets:
            offset.mul_(keep)


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """Each expert's joint norm [E]."""
    return torch.stack([tensor.square().sum(1) for tensor in tensors]).sum(0).sqrt()


def _at_most(limit: Tensor, length: Tensor) -> Tensor:
    """Factors [E, 1] that bring what is longer than the limit down to it."""
    return (limit / length.clamp(min=1e-12)).clamp(max=1)[:, None]
