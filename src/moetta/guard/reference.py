"""The source model to compare with: the same network before adaptation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moetta.core.adapter import Adapter
from moetta.core.inputs import Inputs
from moetta.core.surgery import Surgery


class _AtStart(nn.Module):
    """A network with other values for some parameters; the network itself is not touched."""

    def __init__(self, network: nn.Module, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.network, self.values = network, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.network, self.values, args, kwargs)


class Reference:
    """What the source model says, and how far the adapted parameters are from it.

    An adapter made with ``inplace=True`` has only one network; there the reference is that network
    with the parameters' current values, which for a new adapter are the source model's.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._initial = {name: p.detach().clone() for name, p in adapter.trained.items()}
        surgery = adapter.surgery
        # A view of the user's model in eval mode; its weights are shared, not copied.
        self._model = (
            _AtStart(adapter.network, self._initial)
            if surgery.inplace
            else Surgery(surgery.original, False).model
        )

    def logits(self, inputs: Inputs) -> Tensor:
        """The source model's logits; changes nothing."""
        with torch.inference_mode(False), torch.no_grad():
            return inputs.logits(self._model).detach()

    def drift(self) -> float:
        """Distance of the trained parameters from their source values, relative to their norm."""
        moved = size = 0.0
        for name, parameter in self._adapter.trained.items():
            start = self._initial[name]
            moved += float((parameter.detach() - start).double().square().sum())
            size += float(start.double().square().sum())
        return float((moved / (size or 1.0)) ** 0.5)
