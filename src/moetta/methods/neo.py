"""NEO: subtract the running mean of the last features before the classifier (Murphy, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moetta.core import source_images
from moetta.core.adapter import Source
from moetta.core.config import Config, share
from moetta.core.no_gradient import NoGradientAdapter
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn import ranks
from moetta.nn.head import WrappedHead, find_head, listening


@dataclass(frozen=True)
class NEOConfig(Config):
    """NEO.

    Attributes:
        seed: seed of the draw of source images, with source_mean=True.
        average: over all images so far, or a moving one that forgets ("recent").
        decay: how much of the moving average a batch keeps, with average="recent".
        source_mean: subtract only how far the mean has moved from the source images' mean; NEO
            itself assumes that theirs is zero.
        source_samples: how many source images that mean is computed from.
    """

    average: Literal["all", "recent"] = "all"
    decay: float = 0.9
    source_mean: bool = False
    source_samples: int = 2000

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        share(self, "decay")

    @property
    def needs_source(self) -> bool:
        """Only to compare with the source images' mean."""
        return self.source_mean


class RecentredHead(WrappedHead):
    """Classifies features relative to the mean of those seen so far, the current ones included."""

    mean: Tensor | None = None
    count: Tensor | None = None
    origin: Tensor | None = None

    def __init__(self, classifier: nn.Linear, decay: float | None) -> None:
        super().__init__(classifier)
        self.decay = decay

    def forward(self, features: Tensor) -> Tensor:
        """Centre, then classify."""
        mean = self.mean
        if self.learning:
            mean = self._updated(ranks.whole(self.check(features)))
        if mean is None:
            return self.classify(features)
        offset = mean if self.origin is None else mean - self.origin
        return self.classify(features - offset.to(features.dtype))

    def _updated(self, features: Tensor) -> Tensor | None:
        """The mean after this batch, ignoring samples with non-finite features."""
        features = features[features.isfinite().all(1)]
        if not len(features):
            self.skipped = "non-finite features"
            return self.mean
        before = torch.zeros_like(features[0]) if self.mean is None else self.mean
        if self.decay is not None:  # starts at zero, so early batches are corrected too little
            mean = self.decay * before + (1 - self.decay) * features.mean(0)
            self.fresh = {"mean": mean}
            return mean
        count = len(features) + (0 if self.count is None else self.count)
        mean = before + (features - before).sum(0) / count
        self.fresh = {"mean": mean, "count": torch.as_tensor(count, device=mean.device)}
        return mean


@register(
    "neo",
    NEOConfig,
    title="NEO",
    summary="subtracts the running mean of the last features",
    group="no-gradient",
    citation=Citation(
        "Murphy, Alexander and Danilowski, Michal and Chatterjee, Soumyajit and Ghosh, Abhirup",
        "NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering",
        "ICLR",
        2026,
    ),
    drawn=Drawn("#0d7a5f", "#5cc9ab", "v"),
    needs="a linear classifier",
    cost="1 forward",
)
class NEO(NoGradientAdapter[NEOConfig]):
    """Re-centres the last features; nothing is trained."""

    def wrap(self, classifier: nn.Linear) -> WrappedHead:
        """Centre the classifier's input."""
        recent = self.config.average == "recent"
        self.running["mean"] = None
        if not recent:
            self.running["count"] = None
        return RecentredHead(classifier, self.config.decay if recent else None)

    def build(self, source: Source) -> None:
        """Wrap the classifier; read the source images if configured."""
        if self.config.source_mean:
            source_images.obtain(self, source, self._source_mean)
        super().build(source)

    def _source_mean(self, source: Tensor) -> dict[str, Tensor]:
        config, head = self.config, find_head(self.network)
        total, count = torch.zeros(head.module.in_features, device=self.device), 0
        with torch.no_grad():
            for batch in source_images.batches(source, 64, config.source_samples, config.seed):
                with listening(self.network, head) as heard:
                    logits = batch.map(lambda t: t.to(self.device)).logits(self.model)
                total += heard.of(logits, head).float().sum(0)
                count += len(batch)
        return {"origin": total / count}
