"""The usual choice of what is trained: the norm layers' scales and shifts, by SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config, positive, share
from moetta.nn.norms import BatchStatNorm, Norm, find_norms


@dataclass(frozen=True)
class SGDConfig(Config):
    """Stochastic gradient descent.

    Attributes:
        seed: seed of the method's random draws.
        lr: learning rate.
        momentum: momentum of SGD.
    """

    lr: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "lr")
        share(self, "momentum")

    def sgd(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser that these fields describe."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


C = TypeVar("C", bound=Config, covariant=True)


class NormAffineAdapter(Adapter[C]):
    """Trains the scale and shift of the norm layers that `choose` picks.

    A method with an `SGDConfig` needs to write only its `objective`. BatchNorm layers, if there
    are any, normalise with the statistics of the current batch.
    """

    def choose(self, norms: list[Norm]) -> list[Norm]:
        """The layers to train, out of all of them."""
        return norms

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """What steps the parameters; None for a method that steps them itself."""
        config = self.config
        if not isinstance(config, SGDConfig):
            raise TypeError(
                f"{type(config).__name__} must extend SGDConfig, or {type(self).__name__} must "
                "define make_optimizer()"
            )
        return config.sgd(parameters)

    def build(self, source: Source) -> None:
        """Train the norm layers."""
        norms = find_norms(self.network)
        chosen = self.choose(norms)
        if not chosen:
            names = ", ".join(norm.name for norm in norms)
            raise ValueError(f"{self.method} excludes every norm layer of this model: {names}")
        parameters = self.make_trainable(pair for norm in chosen for pair in norm.parameters())
        for norm in norms:
            if norm.kind == "batch":
                self.surgery.replace(norm.name, BatchStatNorm(norm.module))
        self.optimizer = self.make_optimizer(parameters)
