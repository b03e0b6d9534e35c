"""The source model, to compare with: the same network before adaptation."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.core.adapter import Adapter
from moetta.core.inputs import Inputs
from moetta.core.surgery import Surgery


class Reference:
    """What the source model says, and how far the adapted parameters are from it.

    An adapter made with ``inplace=True`` has only one network; there the adapted parameters are
    replaced by the source values for the length of a call.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._initial = {name: p.detach().clone() for name, p in adapter.trained.items()}
        surgery = adapter._surgery
        # A view of the user's model in eval mode; its weights are shared, not copied.
        self._model = None if surgery.inplace else Surgery(surgery.original, False).model

    def logits(self, inputs: Inputs) -> Tensor:
        """The source model's logits; changes nothing."""
        with torch.inference_mode(False), torch.no_grad():
            if self._model is not None:
                return inputs.logits(self._model).detach()
            adapted = [p.detach().clone() for p in self._adapter.trained.values()]
            self._put(list(self._initial.values()))
            try:
                return self._adapter.predict(inputs).detach()
            finally:
                self._put(adapted)

    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._adapter.trained.values(), values, strict=True):
            parameter.copy_(value)

    def drift(self) -> float:
        """Distance of the trained parameters from their source values, relative to their norm."""
        moved = size = 0.0
        for name, parameter in self._adapter.trained.items():
            start = self._initial[name]
            moved += float((parameter.detach() - start).double().square().sum())
            size += float(start.double().square().sum())
        return float((moved / (size or 1.0)) ** 0.5)
