"""Methods without gradients: the network stays frozen, its last step is corrected."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective
from moetta.nn.head import Head, WrappedHead, find_head, listening

C = TypeVar("C", bound=Config, covariant=True)


class NoGradientAdapter(Adapter[C]):
    """Puts a `WrappedHead` around the classifier; learning is what the head keeps of a batch.

    A method writes `wrap`. The head's running values live in ``self.running``, so reset, save and
    resume work as for every other method, and a merged model keeps the head as it is.
    """

    head: WrappedHead
    _found: Head

    def wrap(self, classifier: nn.Linear) -> WrappedHead:
        """The head that corrects this classifier; `self.running` gets its initial values here."""
        raise TypeError(f"{type(self).__name__} does not define wrap()")

    def build(self, source: Source) -> None:
        """Wrap the classifier; nothing is trained."""
        self._found = find_head(self.network)
        self.head = self.wrap(self._found.module)
        self.surgery.replace(self._found.name, self.head)

    def objective(self, inputs: Inputs) -> Objective:
        """Predict, and take over what the head learnt."""
        self.head.learning = True
        try:
            with torch.inference_mode():
                logits = self._forward(inputs)
        finally:
            self.head.learning = False
        fresh = {name: value.clone() for name, value in self.head.fresh.items()}
        self.head.fresh = {}
        return Objective(logits, running=dict(fresh), skipped=self.head.skipped)

    def predict(self, inputs: Inputs) -> Tensor:
        """Predict without learning."""
        return self._forward(inputs)

    def merge(self) -> nn.Module:
        """A separate, frozen model whose head corrects as it does now."""
        self._hand_over()
        return super().merge()

    def _forward(self, inputs: Inputs) -> Tensor:
        self._hand_over()
        self.head.fresh, self.head.skipped = {}, None
        with listening(self.network, self._found) as heard:
            logits = inputs.logits(self.model)
        heard.of(logits, self._found, inputs.share)  # refuses a model with another classifier
        return logits

    def _hand_over(self) -> None:
        """Give the head the running values; they may have been reset or loaded since."""
        for name, value in self.running.items():
            setattr(self.head, name, value)
