"""The BatchNorm baseline: normalise by the batch, not by the source statistics.

Schneider et al. and Nado et al., both 2020; the mixture of the two is alpha-BN (You et al., 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config, share
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.norms import (
    batch_moments,
    batch_norm,
    find_norms,
    listed,
    trailing_activation,
    values_per_channel,
)


@dataclass(frozen=True)
class NormConfig(Config):
    """Batch statistics in the BatchNorm layers; keeps nothing from one batch to the next.

    Attributes:
        seed: not used.
        source_share: share of the source statistics in the mixture: 0 takes the batch's alone.
    """

    source_share: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        share(self, "source_share")


class MixedStatNorm(nn.Module):
    """A BatchNorm that normalises by a mixture of source and batch statistics."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.Module, source_share: float) -> None:
        super().__init__()
        assert isinstance(norm, _BatchNorm)
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        self.source_share = source_share
        self.tail = trailing_activation(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, scale and shift."""
        mean, var = self.running_mean, self.running_var
        if mean is None:  # a layer without source statistics always takes the batch's
            return self._end(batch_norm(x, self.weight, self.bias, self.eps))
        if values_per_channel(x) > 1:  # a single value per channel has no variance
            mean_b, var_b = batch_moments(x)
            mean = self.source_share * mean + (1 - self.source_share) * mean_b
            var = self.source_share * var + (1 - self.source_share) * var_b
        return self._end(F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps))

    def _end(self, y: Tensor) -> Tensor:
        done: Tensor = self.tail(y)
        return done


C = TypeVar("C", bound=NormConfig, covariant=True)


class BatchStatistics(Adapter[C]):
    """Replaces the statistics of every BatchNorm; nothing is trained."""

    def build(self, source: Source) -> None:
        """Replace the BatchNorm layers."""
        norms = [norm for norm in find_norms(self.network) if norm.kind == "batch"]
        if not norms:
            raise ValueError(
                f"{self.method} replaces the statistics of BatchNorm layers, but this model has "
                f"none (it has {listed(self.network)}); use tent or another method instead"
            )
        for norm in norms:
            mixed = MixedStatNorm(norm.module, self.config.source_share)
            self.surgery.replace(norm.name, mixed)

    def objective(self, inputs: Inputs) -> Objective:
        """Nothing to minimise."""
        with torch.inference_mode():
            return Objective(self.predict(inputs))


@register(
    "norm",
    NormConfig,
    title="Norm",
    summary="normalises by the batch's statistics in BatchNorm layers",
    group="no-gradient",
    citation=Citation(
        "Schneider, Steffen and Rusak, Evgenia and Eck, Luisa and Bringmann, Oliver and "
        "Brendel, Wieland and Bethge, Matthias",
        "Improving robustness against common corruptions by covariate shift adaptation",
        "NeurIPS",
        2020,
    ),
    drawn=Drawn("#7a5c3e", "#c9a780", "<"),
    needs="BatchNorm layers",
    cost="1 forward",
)
class NormAdapter(BatchStatistics[NormConfig]):
    """Batch statistics alone."""


@dataclass(frozen=True)
class AlphaBNConfig(NormConfig):
    """A mixture of source and batch statistics in BatchNorm layers.

    Attributes:
        source_share: share of the source statistics in the mixture (the paper's alpha).
    """

    source_share: float = 0.9


@register(
    "alpha_bn",
    AlphaBNConfig,
    title="alpha-BN",
    summary="mixes source and batch statistics in BatchNorm layers",
    group="no-gradient",
    citation=Citation(
        "You, Fuming and Li, Jingjing and Zhao, Zhou",
        "Test-time batch statistics calibration for covariate shift",
        "arXiv",
        2021,
    ),
    drawn=Drawn("#9c4a1a", "#f0a070", ">"),
    needs="BatchNorm layers",
    cost="1 forward",
)
class AlphaBN(BatchStatistics[AlphaBNConfig]):
    """Mostly source statistics, with a small share of the batch's."""
