"""What Tent, EATA, SAR, DeYO and MGTTA share: they train norm layers' scales and shifts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config, positive, share
from moetta.nn.norms import BatchStatNorm, Norm, find_norms


@dataclass(frozen=True)
class SGDConfig(Config):
    """Stochastic gradient descent.

    Attributes:
        seed: seed of the method's own random draws.
        lr: learning rate.
        momentum: momentum of the SGD.
    """

    lr: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "lr")
        share(self, "momentum")

    def sgd(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser these fields describe."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


class NormAffineAdapter(Adapter):
    """Trains the scale and shift of the norm layers that `choose` picks, by SGD.

    BatchNorms, if there are any, normalise by the batch at hand.
    """

    def choose(self, norms: list[Norm]) -> list[Norm]:
        """The layers that are trained, out of all."""
        return norms

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """What steps the parameters; None for a method that does it by itself."""
        return self.config.sgd(parameters)

    def build(self, source: Source) -> None:
        """Train the norm layers."""
        norms = find_norms(self.network)
        chosen = self.choose(norms)
        if not chosen:
            names = ", ".join(norm.name for norm in norms)
            raise ValueError(f"{self.method} excludes every norm layer of this model: {names}")
        parameters = self.train(pair for norm in chosen for pair in norm.parameters())
        for norm in norms:
            if norm.kind == "batch":
                self._surgery.replace(norm.name, BatchStatNorm(norm.module))
        self.optimizer = self.make_optimizer(parameters)
