"""ROID: diverse, certain samples, two views, a pull to the source model (Marsden et al., 2024).

With ``filter="cmf"`` the pull leads to a Kalman-filtered anchor instead (CMF, Lee and Chang, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import positive, require, share
from moetta.core.functional import entropy, symmetric_cross_entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.core.pixels import PixelConfig, Pixels
from moetta.methods.registry import Citation, Drawn, register

TIED = "all predictions are equally diverse or equally certain, so none stands out"
# CMF's process noise was chosen for this many trained numbers.
CMF_NOISE, CMF_PARAMETERS, CMF_LEAST, CMF_MOST = 0.005, 38_400, 0.89, 0.9999


@dataclass(frozen=True)
class ROIDConfig(PixelConfig, SGDConfig):
    """ROID.

    Attributes:
        seed: seed of the augmentation.
        temperature: how sharply weights separate diverse and certain samples from others.
        decay: how much of the average prediction a step keeps.
        pull: share of the way back to the anchor after each step.
        consistency: learn from an augmented view of the chosen samples too.
        prior: correct the predictions of a batch by its class shares: as a prior
            ("probabilities"), by multiplying the logits, as the authors' code does ("logits"), or
            not at all ("off").
        filter: what the parameters are pulled to: the source values ("none"), or an anchor that
            follows them through a Kalman filter ("cmf").
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"released": {"prior": "logits"}}

    lr: float = 2.5e-4
    temperature: float = 3.0
    decay: float = 0.9
    pull: float = 0.01
    consistency: bool = True
    prior: Literal["probabilities", "logits", "off"] = "probabilities"
    filter: Literal["none", "cmf"] = "none"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "temperature")
        share(self, "decay", "pull")
        require(
            self.prior == "off" or not isinstance(self.reset, str),
            f'reset={self.reset!r} reads the answers that roid corrects; set prior="off" too',
        )


def soft_likelihood_ratio(probabilities: Tensor) -> Tensor:
    """-sum q log(q / (1 - q)) of each row, q capped at 0.99; its gradient does not vanish.

    >>> [round(x, 4) for x in soft_likelihood_ratio(torch.tensor([[0.8, 0.2], [1, 0]])).tolist()]
    [-0.8318, -4.5492]
    """
    q = probabilities.clamp(max=0.99)
    return -(q * (q / (1 - q) + 1e-5).log()).sum(-1)


def sample_weights(probabilities: Tensor, average: Tensor, temperature: float) -> Tensor | None:
    """Weights of a batch's samples, zero for the less diverse half; None if all are tied."""
    diversity = _stretched(1 - F.cosine_similarity(average[None], probabilities, dim=1))
    certainty = _stretched((probabilities * probabilities.clamp(min=1e-30).log()).sum(-1))
    if diversity is None or certainty is None:
        return None
    weights = (temperature * diversity * certainty).exp()
    return weights * (diversity >= diversity.mean())


def _stretched(values: Tensor) -> Tensor | None:
    """Values rescaled to 0..1; None if all are equal, as far as float32 can tell."""
    low, high = values.min(), values.max()
    if high - low <= 4 * torch.finfo(values.dtype).eps * (1 + values.abs().max()):
        return None
    return (values - low) / (high - low)


def smoothed_prior(probabilities: Tensor) -> Tensor:
    """Class shares of a batch, smoothed more if it says less about them.

    >>> prior = smoothed_prior(torch.tensor([[0.5, 0.3, 0.1, 0.1]] * 2))
    >>> [round(share, 2) for share in prior.tolist()]
    [0.3, 0.26, 0.22, 0.22]
    """
    samples, classes = probabilities.shape
    shares = probabilities.mean(0)
    smooth = max(1 / samples, 1 / classes) / shares.max()
    return (shares + smooth) / (1 + smooth * classes)


def kalman(variance: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """How much of CMF's anchor a step keeps, and its variance afterwards.

    >>> kept, variance = [], torch.zeros(())
    >>> for _ in range(3):
    ...     share, variance = kalman(variance, 0.005)
    ...     kept.append(round(share.item(), 6))
    >>> kept
    [0.995, 0.990172, 0.985554]
    """
    variance = 0.99**2 * variance + noise
    keep = ((1 - noise) / (variance + 1 - noise)).clamp(min=CMF_LEAST)
    keep = torch.where(keep >= CMF_MOST, torch.ones_like(keep), keep)
    return keep, keep * variance


@register(
    "roid",
    ROIDConfig,
    title="ROID",
    summary="diverse and certain samples, two views, pulled back to the source model",
    group="consistency",
    citation=Citation(
        "Marsden, Robert A. and Döbler, Mario and Yang, Bin",
        "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior "
        "Correction",
        "WACV",
        2024,
    ),
    drawn=Drawn("#1d4ed8", "#7aa2ff", "X"),
    needs="images",
    cost="1.5 forwards, 1 backward",
)
class ROID(NormAffineAdapter[ROIDConfig]):
    """Weighted likelihood ratios; the answers are corrected by the batch's class shares.

    A paused adapter and a merged model answer without that correction.
    """

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with Nesterov's momentum."""
        config = self.config
        nesterov = config.momentum > 0
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, nesterov=nesterov
        )

    def build(self, source: Source) -> None:
        """Train the norm layers."""
        super().build(source)
        self.pixels = Pixels(self, self.config, "set consistency=False")
        if self.config.consistency:
            self.pixels.require_known()
        self.running["probability"] = None
        self._source = {name: p.detach().clone() for name, p in self.trained.items()}
        if self.config.filter == "cmf":
            self.running["variance"] = torch.zeros((), device=self.device)
            for name, value in self._source.items():
                self.running[f"anchor.{name}"] = value.clone()

    def objective(self, inputs: Inputs) -> Objective:
        """Likelihood ratio and agreement of two views, over the more diverse samples."""
        config, size = self.config, len(inputs)
        logits = self.predict(inputs)
        p = logits.float().softmax(-1)
        known = p.detach()
        average = self.running["probability"]
        if average is None:
            average = torch.full_like(known[0], 1 / known.shape[1])
        answer = self._corrected(logits.detach(), known)
        self.predicted(answer)
        weights = sample_weights(known, average, config.temperature)
        entropies = entropy(logits)
        if weights is None:
            return Objective(answer, entropy=entropies, skipped=TIED)
        selected = weights > 0
        index = selected.nonzero().squeeze(1)
        if not len(index):  # predictions that are not finite have no weight
            return Objective(answer, selected=selected, entropy=entropies)
        weights, p = weights[index], p[index]
        losses = {"likelihood": (weights * soft_likelihood_ratio(p)).sum() / size}
        forwards = size
        if config.consistency:
            other = self._view(inputs.select(index)).logits(self.model)
            agreement = symmetric_cross_entropy(other, logits[index])
            losses["consistency"] = (weights * agreement).sum() / size
            forwards += len(index)
        fresh = config.decay * average + (1 - config.decay) * known.mean(0)
        return Objective(
            answer,
            losses,
            selected=selected,
            entropy=entropies,
            forwards=forwards,
            running={"probability": fresh},
        )

    def _view(self, inputs: Inputs) -> Inputs:
        from moetta.nn.augment import augment  # torchvision takes long to import

        generator = self.generator()
        return self.pixels.changed(
            inputs,
            lambda x: augment(x, generator, blur=False, noise=False, padding="reflect"),
        )

    def _corrected(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        sound = probabilities[probabilities.isfinite().all(1)]
        if self.config.prior == "off" or not len(sound):
            return logits
        prior = smoothed_prior(sound)
        if self.config.prior == "logits":
            return logits * prior
        return logits.float().log_softmax(-1) + prior.log()

    @torch.no_grad()
    def after_step(self, objective: Objective) -> None:
        """Pull the parameters back to their anchor."""
        anchors = self._source
        if self.config.filter == "cmf":
            anchors = self._filtered()
        for name, parameter in self.trained.items():
            parameter.lerp_(anchors[name], self.config.pull)

    def _filtered(self) -> dict[str, Tensor]:
        """The anchor after one step of the Kalman filter."""
        count = sum(p.numel() for p in self.trained.values())
        noise = CMF_NOISE * count / CMF_PARAMETERS
        variance = self.running["variance"]
        assert variance is not None
        keep, self.running["variance"] = kalman(variance, noise)
        anchors: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            before = self.running[f"anchor.{name}"]
            assert before is not None
            predicted = before.lerp(self._source[name], 0.01)
            anchors[name] = keep * predicted + (1 - keep) * parameter
            self.running[f"anchor.{name}"] = anchors[name]
        return anchors
