"""Sharpness-aware minimisation: look at the gradient where the loss is locally worst."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def perturbed(parameters: list[nn.Parameter], grads: list[Tensor], rho: float) -> Iterator[None]:
    """Within the block the parameters are moved by ``rho`` up the joint gradient direction.

    Afterwards they are restored bit for bit, even if the block fails.
    """
    kept = [p.detach().clone() for p in parameters]
    scale = rho / (torch.nn.utils.get_total_norm(grads) + 1e-12)
    try:
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.add_(grad * scale)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
