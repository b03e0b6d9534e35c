"""EATA: learn from reliable, non-redundant samples; stay near the source (Niu et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.core import source_images
from moetta.core.adapter import Source, Step
from moetta.core.config import positive, require, share
from moetta.core.functional import entropy, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.methods.norm_affine import NormAffineAdapter, SGDConfig
from moetta.methods.registry import register


@dataclass(frozen=True)
class EATAConfig(SGDConfig):
    """EATA; with ``fisher_weight=0`` it is ETA, which needs no source images.

    Attributes:
        seed: seed of the draw of source images.
        lr: learning rate.
        momentum: momentum of the SGD.
        e0: entropies below this share of ln C are reliable.
        margin: a sample is redundant if its cosine with the average prediction reaches this.
        fisher_weight: weight of the pull back to the source values.
        fisher_samples: how many source images the Fisher weights are computed from: drawn at
            random from a longer tensor, the first ones of any other iterable.
        fisher_batch: batch size of that computation.
        decay: how much of the average prediction a step keeps.
    """

    lr: float = 6e-4
    e0: float = 0.4
    margin: float = 0.05
    fisher_weight: float = 2000.0
    fisher_samples: int = 2000
    fisher_batch: int = 64
    decay: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "e0", "margin", "fisher_samples", "fisher_batch")
        share(self, "decay")
        require(self.fisher_weight >= 0, f"fisher_weight must be at least 0: {self.fisher_weight}")


class EATA(NormAffineAdapter):
    """Filtered, weighted entropy with a Fisher regulariser."""

    needs_source = True

    def build(self, source: Source) -> None:
        """Train the norm layers; compute or load the Fisher weights."""
        super().build(source)
        self.running["probability"] = None
        if self.config.fisher_weight == 0:
            return
        if source is None:
            raise ValueError(
                "eata needs clean source images for its Fisher weights: pass source=images (a "
                "tensor or an iterable of batches; no labels needed), or use ETA, which is eata "
                "with fisher_weight=0"
            )
        self._anchors = {name: p.detach().clone() for name, p in self.trained.items()}
        source_images.obtain(self, source, self._fisher)

    def _fisher(self, source: Tensor) -> dict[str, Tensor]:
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

    def learn(self, inputs: Inputs) -> Step:
        """One step on the samples that are sure and not yet known."""
        config = self.config
        logits = inputs.logits(self.model)
        e0 = config.e0 * log_classes(logits)
        entropies = entropy(logits)
        probabilities = logits.detach().float().softmax(-1)
        selected = entropies.detach() < e0
        average = self.running["probability"]
        if average is not None:
            cosine = F.cosine_similarity(average[None], probabilities, dim=1)
            selected = selected & (cosine.abs() < config.margin)
        loss = masked_mean(reliability(entropies, e0) * entropies, selected)
        losses = {"entropy": loss}
        if config.fisher_weight:
            losses["fisher"] = config.fisher_weight * self._distance()
        count = int(selected.sum())
        skipped = (
            "no sample selected"
            if count == 0
            else self.descend(torch.stack([*losses.values()]).sum())
        )
        if not skipped:
            fresh = probabilities[selected].mean(0)
            keep = config.decay
            self.running["probability"] = (
                fresh if average is None else keep * average + (1 - keep) * fresh
            )
        return Step(
            logits,
            forwards=len(inputs),
            backwards=0 if skipped else count,
            entropy=entropies,
            selected=selected,
            losses=losses,
            skipped=skipped,
        )

    def _distance(self) -> Tensor:
        """Squared distance to the source values, each weighed by its importance."""
        total = torch.zeros((), device=self.device)
        for name, parameter in self.trained.items():
            fisher = self.running[f"fisher.{name}"]
            assert fisher is not None
            total = total + (fisher * (parameter - self._anchors[name]) ** 2).sum()
        return total


register("eata", EATAConfig, EATA, "reliable and non-redundant samples, Fisher-regularised")
