"""The source model to compare with: the network before adaptation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moetta.core.adapter import Adapter
from moetta.core.inputs import Inputs
from moetta.core.surgery import Surgery


class Reference:
    """What the source model says, and how far the adapted parameters are from it."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._initial = adapter.at_start()
        self._size = _size(adapter, self._initial)
        # A view of the user's model in eval mode; its weights are shared, not copied.
        self._model = Surgery(adapter.surgery.original, False).model

    def logits(self, inputs: Inputs) -> Tensor:
        """The source model's logits; changes nothing."""
        with torch.inference_mode(False), torch.no_grad():
            return inputs.logits(self._model).detach()

    def drift(self) -> float:
        """Distance of the trained parameters from their source values, relative to their norm.

        Parameters that all start at zero, such as offsets of a frozen scale, have no norm; theirs
        is that of their layers.
        """
        moved = sum(_square(p - self._initial[name]) for name, p in self._adapter.trained.items())
        return float((moved / self._size) ** 0.5)


def _square(values: Tensor) -> float:
    return float(values.detach().double().square().sum())


def _size(adapter: Adapter, start: Mapping[str, Tensor]) -> float:
    """The squared norm that the trained parameters' distance is compared with."""
    own = sum(map(_square, start.values()))
    if own:
        return own
    trained = {id(p) for p in adapter.trained.values()}
    layers = [list(layer.parameters(recurse=False)) for layer in adapter.network.modules()]
    beside = [p for layer in layers if trained & set(map(id, layer)) for p in layer]
    return sum(_square(p) for p in beside if id(p) not in trained) or 1.0
