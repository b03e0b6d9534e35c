"""What the guard answers: the adapted model's word, the source model's, or both in proportion."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Trouble = tuple[str, float, float]  # reason, value and threshold


class Answer(NamedTuple):
    """An answer, the adapted model's weight in it, what is wrong, and what it cost in forwards."""

    logits: Tensor
    weight: float = 1.0
    trouble: Trouble | None = None
    extra: int = 0


def weighted_mean(source: Tensor, adapted: Tensor, weight: float, temperature: float) -> Tensor:
    """Logits of the weighted mean of both models' probabilities.

    Args:
        source: the source model's logits.
        adapted: the adapted model's logits.
        weight: the adapted model's weight.
        temperature: makes the adapted model as sure as the source model; see `Sureness`. Otherwise
            the surer one would decide, whatever the weight.
    """
    if weight == 0:
        return source
    rest = source.log_softmax(-1) + math.log1p(-weight)
    return torch.logaddexp(rest, (adapted / temperature).log_softmax(-1) + math.log(weight))


def finite(tensor: Tensor) -> bool:
    """Whether all values are."""
    return bool(torch.isfinite(tensor.detach()).all())
