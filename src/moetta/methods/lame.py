"""LAME: smooth the predictions inside a batch, so that neighbours agree (Boudiaf et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moetta.core.config import Config, positive
from moetta.core.no_gradient import NoGradientAdapter
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn import ranks
from moetta.nn.head import WrappedHead

ITERATIONS, TOLERANCE = 100, 1e-8


@dataclass(frozen=True)
class LAMEConfig(Config):
    """LAME. It keeps nothing from one batch to the next.

    Attributes:
        seed: not used.
        affinity: how alike two samples are: a Gaussian of their distance ("rbf"), or 1 for near
            neighbours and 0 for all others ("knn").
        neighbours: "rbf" takes its width from the distance to this neighbour, counting the sample
            itself; "knn" links this many.
    """

    affinity: Literal["rbf", "knn"] = "rbf"
    neighbours: int = 5

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "neighbours")


ALONE = "an image without others that differ has nothing to agree with"


def rbf_affinity(features: Tensor, neighbours: int) -> Tensor | None:
    """exp(-d²/2σ²) between unit-length features [B, B]; σ is the mean distance to a neighbour.

    None if all neighbours are copies, or there are none: σ would be zero.
    """
    distance = _distances(features)
    nearest = min(neighbours, len(features))
    sigma = distance.kthvalue(nearest, dim=1).values.mean()
    if sigma == 0:
        return None
    return (-((distance / sigma) ** 2) / 2).exp()


def knn_affinity(features: Tensor, neighbours: int) -> Tensor | None:
    """1 from each sample to its nearest others, made symmetric [B, B]; None for a single one."""
    if len(features) == 1:
        return None
    distance = _distances(features).fill_diagonal_(float("inf"))
    nearest = distance.topk(min(neighbours, len(features) - 1), largest=False).indices
    links = torch.zeros_like(distance).scatter_(1, nearest, 1.0)
    return (links + links.T) / 2


def _distances(features: Tensor) -> Tensor:
    unit = nn.functional.normalize(features, dim=1)
    # Differences, not the product form: copies of one image are then exactly 0 apart.
    return torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")


def smoothed(probabilities: Tensor, affinity: Tensor) -> Tensor:
    """Assignments that stay near the predictions and agree with those of similar samples."""
    unary = -(probabilities + 1e-10).log()
    y, before = probabilities, None
    for iteration in range(ITERATIONS):
        pairwise = affinity @ y
        y = (pairwise - unary).softmax(-1)
        energy = float((unary * y - y * (affinity @ y) + y * (y + 1e-20).log()).sum())
        if iteration > 1 and before is not None and abs(energy - before) <= TOLERANCE * abs(before):
            break
        before = energy
    return y


class SmoothingHead(WrappedHead):
    """Classifies a batch, then lets similar samples agree."""

    def __init__(self, classifier: nn.Linear, config: LAMEConfig) -> None:
        super().__init__(classifier)
        self.config = config

    def forward(self, features: Tensor) -> Tensor:
        """Logarithms of the smoothed probabilities."""
        checked = self.check(features)
        logs = self.classify(features).to(checked.dtype).log_softmax(-1)
        return ranks.held_of(self._agreed(ranks.whole(checked), ranks.whole(logs)))

    def _agreed(self, checked: Tensor, logs: Tensor) -> Tensor:
        sound = checked.isfinite().all(1) & logs.isfinite().any(1)
        if not sound.any():
            self.skipped = "non-finite features"
            return logs
        affinity = rbf_affinity if self.config.affinity == "rbf" else knn_affinity
        weights = affinity(checked[sound], self.config.neighbours)
        if weights is None:
            self.skipped = ALONE
            return logs
        y = smoothed(logs[sound].exp(), weights).clamp(min=torch.finfo(logs.dtype).tiny)
        return logs.index_copy(0, sound.nonzero().squeeze(1), y.log())


@register(
    "lame",
    LAMEConfig,
    title="LAME",
    summary="smooths the predictions inside a batch",
    group="no-gradient",
    citation=Citation(
        "Boudiaf, Malik and Mueller, Romain and Ben Ayed, Ismail and Bertinetto, Luca",
        "Parameter-free Online Test-time Adaptation",
        "CVPR",
        2022,
    ),
    drawn=Drawn("#8a6d1d", "#d6b75e", "^"),
    needs="a linear classifier",
    cost="1 forward",
)
class LAME(NoGradientAdapter[LAMEConfig]):
    """Corrects each batch's outputs separately."""

    def wrap(self, classifier: nn.Linear) -> WrappedHead:
        """Smooth the classifier's output."""
        return SmoothingHead(classifier, self.config)
