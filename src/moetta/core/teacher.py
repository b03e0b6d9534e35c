"""A teacher: a slow copy of the trained parameters that shares the student's network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter


@contextlib.contextmanager
def holding(parameters: list[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Within the block the parameters hold other values; nothing is copied.

    Only for passes without gradients.
    """
    kept = [p.data for p in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()  # it knows tensors by identity, not by value
        yield
    finally:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()


class Teacher:
    """Follows the trained parameters slowly. Its values are running values of the adapter."""

    def __init__(self, adapter: Adapter[Any]) -> None:
        self.adapter = adapter
        for name, parameter in adapter.trained.items():
            adapter.running[f"teacher.{name}"] = parameter.detach().clone()

    def values(self) -> list[Tensor]:
        """Its parameters, in the order of `Adapter.trained`."""
        found = [self.adapter.running[f"teacher.{name}"] for name in self.adapter.trained]
        return [value for value in found if value is not None]

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the network is the teacher's. Only for passes without gradients."""
        return holding(list(self.adapter.trained.values()), self.values())

    @torch.no_grad()
    def follow(self, keep: float) -> None:
        """Move towards the student, keeping this share of every value."""
        for teacher, student in zip(self.values(), self.adapter.trained.values(), strict=True):
            teacher.mul_(keep).add_(student, alpha=1 - keep)
