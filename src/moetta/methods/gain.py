"""GAIN: class means propose an answer, their expected gain decides how far to follow (2026)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetta.core.config import Config, positive
from moetta.core.no_gradient import NoGradientAdapter
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn import ranks
from moetta.nn.head import WrappedHead

BISECTIONS = 40


@dataclass(frozen=True)
class GAINConfig(Config):
    """GAIN.

    Attributes:
        seed: not used.
        prior: how many samples the classifier's own rows count for, as class means (k0).
        normalise: give features and rows unit length first. The paper does not say; the formulas
            are the same. Without it, the method loses ten points on our validation streams.
    """

    prior: float = 3.0
    normalise: bool = True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "prior")


@dataclass(frozen=True)
class ClassMeans:
    """What is believed about the classes.

    Attributes:
        means: mean features of each class [C, D].
        variance: variance of each dimension, shared by all classes [D].
        counts: how many samples each mean is based on [C].
        log_prior: logarithm of each class's share [C].
    """

    means: Tensor
    variance: Tensor
    counts: Tensor
    log_prior: Tensor

    def distances(self, features: Tensor) -> Tensor:
        """Squared distances in units of the variance [B, C]."""
        scale = self.variance.rsqrt()
        return torch.cdist(features * scale, self.means * scale).square()

    def proposals(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities given the means, and given means that may be wrong."""
        distance = self.distances(features)
        sure = (self.log_prior - distance / 2).log_softmax(-1)
        wider = 1 + 1 / self.counts
        spread = wider.log() * features.shape[1] / 2
        unsure = (self.log_prior - spread - distance / (2 * wider)).log_softmax(-1)
        return sure, unsure


def follow(source: Tensor, sure: Tensor, unsure: Tensor) -> Tensor:
    """How far to go from the source model's answer to the proposed one, per sample [B] in 0..1.

    All are log-probabilities. The answer moves as far as the gain that is expected once the
    uncertainty of the means is counted.
    """
    change = sure - source
    expected = (unsure.exp() * change).sum(-1)

    def gain(share: Tensor) -> Tensor:
        return ((source + share[:, None] * change).softmax(-1) * change).sum(-1)

    low, high = torch.zeros_like(expected), torch.ones_like(expected)
    none, all_the_way = expected <= gain(low), expected >= gain(high)
    for _ in range(BISECTIONS):  # the gain grows with the share
        middle = (low + high) / 2
        below = gain(middle) < expected
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    share = (low + high) / 2
    return share.masked_fill(all_the_way, 1.0).masked_fill(none, 0.0)


class ClassMeansHead(WrappedHead):
    """Combines the original classifier with class means that grow with the stream.

    Attributes:
        mass: samples of each class so far, as far as the source model supports them [C].
        claims: samples of each class so far, as they were answered [C].
        sums: weighted sums of the features [C, D].
        squares: weighted sums of their squares [C, D].
        squared_weights: sums of the squared weights [C].
    """

    mass: Tensor
    claims: Tensor
    sums: Tensor
    squares: Tensor
    squared_weights: Tensor

    def __init__(self, classifier: nn.Linear, config: GAINConfig) -> None:
        super().__init__(classifier)
        self.prior, self.normalise = config.prior, config.normalise

    def nothing_seen(self) -> dict[str, Tensor]:
        """The running values before the first batch."""
        rows = self.classifier.weight.detach().float()
        by_class, by_feature = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows)
        return {
            "mass": by_class,
            "claims": by_class.clone(),
            "sums": by_feature,
            "squares": by_feature.clone(),
            "squared_weights": by_class.clone(),
        }

    def _unit(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1) if self.normalise else x

    def believed(self) -> ClassMeans:
        """Means, variance and class shares, from the sums so far and the classifier's rows."""
        rows, k0, n = self._unit(self.classifier.weight.detach().float()), self.prior, self.mass
        some = n.clamp(min=torch.finfo(n.dtype).tiny)  # a class never predicted adds nothing
        scatter = (self.squares - self.sums**2 / some[:, None]).clamp(min=0).sum(0)
        freedom = (n - self.squared_weights / some).clamp(min=0).sum()
        mass, claims = k0 + n, k0 + self.claims
        return ClassMeans(
            means=(k0 * rows + self.sums) / mass[:, None],
            variance=(k0 + scatter) / (k0 + freedom),
            counts=mass,
            log_prior=(mass.log() - 2 * claims.log()).log_softmax(-1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Log-probabilities, between the classifier's and the class means'."""
        x = self._unit(self.check(features))
        source = self.classify(features).to(x.dtype).log_softmax(-1)
        answer = source
        if bool(self.claims.any()):  # the first batch is answered by the source model
            sure, unsure = self.believed().proposals(x)
            share = follow(source, sure, unsure)
            answer = (source + share[:, None] * (sure - source)).log_softmax(-1)
        if self.learning:
            self.fresh = self.counted(*map(ranks.whole, (x, source, answer)))
        return answer

    def counted(self, x: Tensor, source: Tensor, answer: Tensor) -> dict[str, Tensor]:
        """The running values with one more batch; the source model's support weighs each sample."""
        p = answer.exp()
        weight = source.gather(1, answer.argmax(1, keepdim=True)).exp() * p
        return {
            "mass": self.mass + weight.sum(0),
            "claims": self.claims + p.sum(0),
            "sums": self.sums + weight.T @ x,
            "squares": self.squares + weight.T @ x**2,
            "squared_weights": self.squared_weights + (weight**2).sum(0),
        }


@register(
    "gain",
    GAINConfig,
    title="GAIN",
    summary="class means that grow with the stream correct the classifier",
    group="no-gradient",
    citation=Citation("", "GAIN", "preprint", 2026),
    drawn=Drawn("#5a4fcf", "#a9a2ff", "D"),
    needs="a linear classifier",
    cost="1 forward",
)
class GAIN(NoGradientAdapter[GAINConfig]):
    """Bayesian class means over the last features; nothing is trained."""

    def wrap(self, classifier: nn.Linear) -> WrappedHead:
        """Let class means correct the classifier's output."""
        head = ClassMeansHead(classifier, self.config)
        self.running |= head.nothing_seen()
        return head
