"""SPA: predict the clean answer from weakened views of the image (Niu et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.core.adapter import Source
from moetta.core.config import positive, require, share
from moetta.core.functional import entropy, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective, Step
from moetta.core.pixels import PixelConfig, Pixels
from moetta.core.predictor import PredictorAdapter, PredictorConfig
from moetta.methods.registry import Citation, Drawn, register

ETA_E0, ETA_MARGIN = 0.4, 0.05


@dataclass(frozen=True)
class SPAConfig(PixelConfig, PredictorConfig):
    """SPA. The defaults are the authors' for a ViT; the preset "resnet50_gn" has the others.

    Attributes:
        seed: seed of the views.
        window: side of the square of low frequencies that may be dropped, as a share of the image.
        frequency_drop: probability with which each of them is dropped, together with the
            opposite one.
        noise: mean share of noise in the second view.
        noise_lr: rate at which the noise moves to where it disturbs most.
        patch: side of the patches that share one amount of noise, in pixels.
        extra: another loss on the clean prediction: none, Tent's entropy, or ETA's on samples that
            are sure and new.
        extra_weight: weight of that loss.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "resnet50_gn": {
            "lr": 2.5e-3,
            "predictor_lr": 2.5e-2,
            "frequency_drop": 0.1,
            "noise": 0.1,
        }
    }

    lr: float = 0.01
    predictor_lr: float = 0.05
    window: float = 0.2
    frequency_drop: float = 0.2
    noise: float = 0.4
    noise_lr: float = 1.0
    patch: int = 16
    extra: Literal["none", "tent", "eta"] = "none"
    extra_weight: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "noise_lr", "patch")
        share(self, "window", "frequency_drop", "noise")
        require(self.extra_weight >= 0, f"extra_weight must be at least 0, got {self.extra_weight}")


def low_frequencies(side: int, share: float) -> tuple[int, int]:
    """First and last row of the centred window of low frequencies.

    >>> low_frequencies(224, 0.2)
    (90, 133)
    """
    width = int(share * side)
    first = side // 2 - width // 2
    return first, first + width - 1


def drop_frequencies(
    images: Tensor, share: float, probability: float, generator: torch.Generator
) -> Tensor:
    """Images without a random part of their low frequencies; the phase is kept.

    One mask serves the whole batch and is symmetric about the centre, so the result is real.
    """
    height, width = images.shape[-2:]
    top, bottom = low_frequencies(height, share)
    left, right = low_frequencies(width, share)
    inside = torch.zeros(height, width, dtype=torch.bool, device=images.device)
    inside[top : bottom + 1, left : right + 1] = True
    inside = torch.fft.ifftshift(inside)
    # A pair of opposite frequencies shares one draw, so each is dropped with this probability.
    drawn = torch.rand(height, width, generator=generator, device=images.device)
    number = torch.arange(height * width, device=images.device).view(height, width)
    first_of_pair = torch.minimum(number, _opposite(number))
    dropped = (inside | _opposite(inside)) & (drawn.flatten()[first_of_pair] < probability)
    view: Tensor = torch.fft.ifft2(torch.fft.fft2(images) * ~dropped).real
    return view


def _opposite(spectrum: Tensor) -> Tensor:
    """What stands at the opposite frequency: -f is at index -f modulo the side."""
    return spectrum.flip(0, 1).roll((1, 1), (0, 1))


def rescaled(amounts: Tensor, share: float) -> Tensor:
    """Amounts whose mean square is ``share``, as far as staying within [-1, 1] allows.

    >>> amounts = torch.tensor([1.0, 0.5, 0.5, 0.0])
    >>> [round(a, 6) for a in rescaled(amounts, 0.4).tolist()]
    [1.0, 0.516398, 0.516398, 0.0]
    """
    mean = (amounts**2).mean()
    if mean == 0:
        return torch.full_like(amounts, share**0.5)
    return (amounts * (share / mean).sqrt()).clamp(-1, 1)


def _whole(amounts: Tensor, patch: int, height: int, width: int) -> Tensor:
    """One amount per patch, spread over its pixels [1, 1, H, W]."""
    spread = amounts.repeat_interleave(patch, 0).repeat_interleave(patch, 1)
    return spread[None, None, :height, :width]


@register(
    "spa",
    SPAConfig,
    title="SPA",
    summary="predicts the clean answer from weakened views",
    group="consistency",
    citation=Citation(
        "Niu, Shuaicheng and Chen, Guohao and Zhao, Peilin and Wang, Tianyi and Wu, Pengcheng and "
        "Shen, Zhiqi",
        "Self-Bootstrapping for Versatile Test-Time Adaptation",
        "ICML",
        2025,
    ),
    drawn=Drawn("#7c2d8a", "#d08be0", "h"),
    needs="images, a linear classifier",
    cost="3 forwards, 2 backwards",
)
class SPA(PredictorAdapter[SPAConfig]):
    """The clean prediction teaches two weakened views; the noise learns where it disturbs."""

    over_ranks = True

    _seen: Tensor | None

    def build(self, source: Source) -> None:
        """Train the norm layers and the predictor."""
        super().build(source)
        self.pixels = Pixels(self, self.config, "use another method")
        self.pixels.require_known()
        self.running |= {"noise": None, "noise_momentum": None}
        if self.config.extra == "eta":
            self.running["probability"] = None

    def objective(self, inputs: Inputs) -> Objective:
        """How far the views' predictions are from the clean one, where they are less sure."""
        config, size = self.config, len(inputs)
        images = inputs.images
        if images is None:
            raise ValueError("spa weakens images and needs an image batch [B, C, H, W]")
        with torch.set_grad_enabled(config.extra != "none"):
            logits = self.predict(inputs)
        self.predicted(logits)
        target = logits.detach().float().log_softmax(-1)
        self._noise = self._amounts(images).requires_grad_(True)
        losses: dict[str, Tensor] = {}
        selected = torch.zeros(size, dtype=torch.bool, device=images.device)
        self._pairs, self._seen = 0, None
        for name, view in (("frequencies", self._dropped(images)), ("noise", self._noisy(images))):
            online = self.branches(inputs.with_images(view))[1].log_softmax(-1)
            harder = target.amax(-1) > online.detach().amax(-1)
            divergence = (target.exp() * (target - online)).sum(-1)
            losses[name] = masked_mean(divergence, harder)
            selected |= harder
            self._pairs += int(harder.sum())
        entropies = entropy(logits)
        if config.extra != "none":
            extra, sure = self._extra(logits, entropies)
            losses["extra"] = config.extra_weight * extra
            selected |= sure
            self._pairs += int(sure.sum())
        return Objective(
            logits, losses, selected=selected, entropy=entropies.detach(), forwards=3 * size
        )

    def learn(self, inputs: Inputs) -> Step:
        """One step down for the weights, one step up for the noise."""
        found = self.objective(inputs)
        step = Step(
            found.logits,
            forwards=3 * len(inputs),
            entropy=found.entropy,
            selected=found.selected,
            losses=found.losses,
            skipped=found.why_not(),
        )
        if step.skipped is None:
            grads = self.gradients(found.total(), [self._noise])
            if grads is None:
                step.skipped = "non-finite loss or gradient"
            else:
                self.step_along(grads[:-1])
                self._raise_noise(grads[-1])
                if self._seen is not None:
                    self.running["probability"] = self._seen
                step.backwards = self._pairs
        return step

    def _extra(self, logits: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Tent's loss, or ETA's on samples that are sure and new; and which samples it is of."""
        if self.config.extra == "tent":
            return entropies.mean(), torch.ones_like(entropies, dtype=torch.bool)
        e0 = ETA_E0 * log_classes(logits)
        kept = entropies.detach() < e0
        p, average = logits.detach().float().softmax(-1), self.running["probability"]
        if average is not None:
            kept = kept & (F.cosine_similarity(average[None], p, dim=1).abs() < ETA_MARGIN)
        if kept.any():
            fresh = p[kept].mean(0)
            self._seen = fresh if average is None else 0.9 * average + 0.1 * fresh
        return masked_mean(reliability(entropies, e0) * entropies, kept), kept

    def _amounts(self, images: Tensor) -> Tensor:
        """How much noise each patch gets; the same for all at first."""
        rows, columns = (-(-side // self.config.patch) for side in images.shape[-2:])
        now = self.running["noise"]
        if now is None or now.shape != (rows, columns):  # a stream of another image size
            now = torch.full((rows, columns), self.config.noise**0.5, device=images.device)
        return now.detach().clone()

    def _dropped(self, images: Tensor) -> Tensor:
        config = self.config
        pixels = images.float()
        return drop_frequencies(pixels, config.window, config.frequency_drop, self.generator()).to(
            images.dtype
        )

    def _noisy(self, images: Tensor) -> Tensor:
        """Each patch mixed with noise, one draw for the whole batch, in the range of pixels."""
        mean, std = self.pixels.scale(images)
        shape = (1, *images.shape[1:])
        drawn = torch.randn(shape, generator=self.generator(1), device=images.device)
        part = _whole(self._noise, self.config.patch, *images.shape[-2:]) ** 2
        mixed = (1 - part) * images + part * drawn
        view = torch.minimum(torch.maximum(mixed, (0 - mean) / std), (1 - mean) / std)
        return view.to(images.dtype)

    @torch.no_grad()
    def _raise_noise(self, gradient: Tensor) -> None:
        momentum = self.running["noise_momentum"]
        if momentum is not None and momentum.shape == gradient.shape:
            gradient = 0.9 * momentum + gradient
        self.running["noise_momentum"] = gradient.clone()
        moved = self._noise.detach() + self.config.noise_lr * gradient
        self.running["noise"] = rescaled(moved, self.config.noise)
