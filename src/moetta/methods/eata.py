"""EATA: reliable, non-redundant samples, kept near the source model (Niu et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.core import source_images
from moetta.core.adapter import Source
from moetta.core.config import positive, require, share
from moetta.core.functional import UNCERTAINTIES, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register


@dataclass(frozen=True)
class EATAConfig(SGDConfig):
    """EATA; with ``fisher_weight=0`` it is ETA, which needs no source images.

    Attributes:
        seed: seed of the draw of source images.
        e0: entropies below this share of ln C are reliable.
        margin: a sample is redundant if its cosine with the average prediction reaches this.
        fisher_weight: weight of the pull back to the source model.
        fisher_samples: how many source images the Fisher weights are computed from: drawn at
            random from a longer tensor, the first ones of any other iterable.
        fisher_batch: batch size of that computation.
        objective: the measure of uncertainty to minimise: the entropy of the prediction, or COME's
            entropy of an opinion ("come").
        decay: how much of the average prediction a step keeps.
    """

    lr: float = 6e-4
    e0: float = 0.4
    margin: float = 0.05
    fisher_weight: float = 2000.0
    fisher_samples: int = 2000
    fisher_batch: int = 64
    objective: Literal["entropy", "come"] = "entropy"
    decay: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "e0", "margin", "fisher_samples", "fisher_batch")
        share(self, "decay")
        require(
            self.fisher_weight >= 0, f"fisher_weight must be at least 0, got {self.fisher_weight}"
        )

    @property
    def needs_source(self) -> bool:
        """Only the Fisher weights are computed from source images."""
        return self.fisher_weight != 0


@register(
    "eata",
    EATAConfig,
    title="EATA",
    summary="learns from reliable, non-redundant samples and stays near the source model",
    group="entropy",
    citation=Citation(
        "Niu, Shuaicheng and Wu, Jiaxiang and Zhang, Yifan and Chen, Yaofo and Zheng, Shijian and "
        "Zhao, Peilin and Tan, Mingkui",
        "Efficient Test-Time Model Adaptation without Forgetting",
        "ICML",
        2022,
    ),
    drawn=Drawn("#0e7c5b", "#3ecf9c", "^"),
    cost="1 forward, at most 1 backward",
    paper_row=2,
)
class EATA(NormAffineAdapter[EATAConfig]):
    """Filtered, weighted entropy with a Fisher regulariser."""

    without_source = "; or use ETA, which is eata with fisher_weight=0"

    def build(self, source: Source) -> None:
        """Train the norm layers; compute or load the Fisher weights."""
        super().build(source)
        self.running["probability"] = None
        if self.config.needs_source:
            self._anchors = {name: p.detach().clone() for name, p in self.trained.items()}
            source_images.obtain(self, source, self._fisher)

    def _fisher(self, source: Any) -> dict[str, Tensor]:
        """Mean over batches of the squared gradient of each batch's mean pseudo-label loss."""
        sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        batches = 0
        config = self.config
        for batch in source_images.batches(
            source, config.fisher_batch, config.fisher_samples, config.seed
        ):
            logits = batch.map(lambda t: t.to(self.device)).logits(self.model)
            loss = F.cross_entropy(logits.float(), logits.argmax(-1))
            grads = self.gradients(loss)
            if grads is None:
                raise ValueError(
                    "the source images give non-finite gradients; check that they are normalised "
                    "as the model expects"
                )
            for total, grad in zip(sums.values(), grads, strict=True):
                total += grad**2
            batches += 1
        return {f"fisher.{name}": total / batches for name, total in sums.items()}

    def objective(self, inputs: Inputs) -> Objective:
        """Weighted entropy of the samples that are reliable and not yet known."""
        config = self.config
        logits = self.predict(inputs)
        e0 = config.e0 * log_classes(logits)
        entropies = UNCERTAINTIES[config.objective](logits)
        selected = entropies.detach() < e0
        average = self.running["probability"]
        if average is not None:
            cosine = F.cosine_similarity(average[None], _probabilities(logits), dim=1)
            selected = selected & (cosine.abs() < config.margin)
        losses = {"entropy": masked_mean(reliability(entropies, e0) * entropies, selected)}
        if config.fisher_weight:
            losses["fisher"] = config.fisher_weight * self._distance()
        return Objective(logits, losses, selected)

    def after_step(self, objective: Objective) -> None:
        """Move the average prediction towards the samples learnt from."""
        fresh = _probabilities(objective.logits)[objective.selected].mean(0)
        average, keep = self.running["probability"], self.config.decay
        self.running["probability"] = (
            fresh if average is None else keep * average + (1 - keep) * fresh
        )

    def _distance(self) -> Tensor:
        """Squared distance to the source values, weighted by importance."""
        total = torch.zeros((), device=self.device)
        for name, parameter in self.trained.items():
            fisher = self.running[f"fisher.{name}"]
            assert fisher is not None
            total = total + (fisher * (parameter - self._anchors[name]) ** 2).sum()
        return total


def _probabilities(logits: Tensor) -> Tensor:
    return logits.detach().float().softmax(-1)
