"""A trained predictor between the features and the frozen classifier, for a second branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import positive
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.nn.head import Head, find_head, listening


@dataclass(frozen=True)
class PredictorConfig(SGDConfig):
    """SGD for the norm layers and a predictor.

    Attributes:
        lr: learning rate of the norm layers.
        predictor_lr: learning rate of the predictor.
    """

    predictor_lr: float = 5e-3

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "predictor_lr")


C = TypeVar("C", bound=PredictorConfig, covariant=True)


class PredictorAdapter(NormAffineAdapter[C]):
    """Trains the norm layers and a square matrix before the classifier, at first the identity.

    Only the second branch goes through the matrix; the answers do not.
    """

    head: Head
    predictor: nn.Parameter

    def build(self, source: Source) -> None:
        """Train the norm layers and the predictor."""
        super().build(source)
        self.head = find_head(self.network)
        norms, weight = list(self.trained.values()), self.head.module.weight
        self.predictor = nn.Parameter(torch.eye(weight.shape[1], device=weight.device))
        self.make_trainable([("predictor", self.predictor)])
        groups = (norms, self.config.lr), ([self.predictor], self.config.predictor_lr)
        self.optimizer = torch.optim.SGD(
            [{"params": parameters, "lr": lr} for parameters, lr in groups],
            momentum=self.config.momentum,
        )

    def branches(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The plain logits, and those that go through the predictor."""
        with listening(self.network, self.head) as heard:
            logits = self.predict(inputs)
        heard_features = heard.of(logits, self.head, inputs.share).float()
        features = F.linear(heard_features, self.predictor)
        classifier = self.head.module
        bias = None if classifier.bias is None else classifier.bias.float()
        return logits, inputs.whole(F.linear(features, classifier.weight.float(), bias))
