"""CoTTA: learn from a slow teacher, now and then forget a little (Wang et al., 2022)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source, Step
from moetta.core.config import positive, require, share
from moetta.core.inputs import Inputs
from moetta.methods.norm_affine import SGDConfig
from moetta.methods.registry import register
from moetta.nn.norms import BatchStatNorm, describe

UNSAID = (
    "cotta augments un-normalised pixels, but this model does not say how its inputs are "
    "normalised: pass mean= and std= (one number a channel), or threshold=0 to do without "
    "augmentation"
)


@dataclass(frozen=True)
class CoTTAConfig(SGDConfig):
    """CoTTA.

    Attributes:
        seed: seed of the augmentations and of the forgetting.
        lr: learning rate.
        momentum: momentum of the SGD.
        threshold: where the source model's mean confidence on a batch is below this, the teacher
            looks at augmented views. The authors' rule for other models than ImageNet's: the 5 %
            quantile of the confidence on source images, minus 0.05. 0 never augments.
        augmentations: how many views the teacher's logits are then averaged over.
        decay: how much of itself the teacher keeps at each step.
        restore: probability with which each trained number goes back to its source value.
        mean: the mean that was subtracted from the pixels, by channel, so that augmentation can
            undo it; None reads it off a timm model's own configuration.
        std: the standard deviation that the pixels were divided by; None as for the mean.
    """

    lr: float = 1e-3
    threshold: float = 0.1
    augmentations: int = 32
    decay: float = 0.999
    restore: float = 0.001
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "augmentations")
        share(self, "threshold", "decay", "restore")
        require((self.mean is None) == (self.std is None), "give both mean and std, or neither")
        require(not self.std or min(self.std) > 0, f"std must be above 0, not {self.std}")


class CoTTA(Adapter):
    """A student that trains all weights and biases, and the teacher that follows it.

    The teacher answers. Its weights are running values; it, the student and the frozen source
    model (the anchor) are one network that holds each one's weights in turn. `forwards` counts
    all three, the anchor too, which the paper's table leaves out.
    """

    def build(self, source: Source) -> None:
        """Train every weight and bias; the teacher starts as the source model."""
        for name, module in list(self.network.named_modules()):
            norm = describe(name, module)
            if norm is not None and norm.kind == "batch":
                self._surgery.replace(name, BatchStatNorm(module))
        named = list(self.network.named_parameters())
        chosen = [(n, p) for n, p in named if n.rpartition(".")[2] in ("weight", "bias")]
        if not chosen:
            raise ValueError("cotta trains weights and biases, and this model has none")
        parameters = self.train(chosen)
        self.optimizer = self.config.sgd(parameters)
        # What is not trained is the same in all three, so the teacher keeps the trained only.
        for name, parameter in chosen:
            self.running[f"teacher.{name}"] = parameter.detach().clone()
        if self.config.threshold > 0 and None in self._normalisation()[:2]:
            # An uncertain batch may come late, and would end the run.
            unsure = f"once the mean confidence in a batch falls below {self.config.threshold}, "
            warnings.warn(unsure + UNSAID, stacklevel=4)

    def _teacher(self) -> list[Tensor]:
        values = [self.running[f"teacher.{name}"] for name in self.trained]
        return [value for value in values if value is not None]

    def _as(self, values: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        return holding(list(self.trained.values()), values)

    def predict(self, inputs: Inputs) -> Tensor:
        """What the teacher says."""
        with self._as(self._teacher()):
            return inputs.logits(self.model)

    def learn(self, inputs: Inputs) -> Step:
        """One step of the student towards the teacher, one of the teacher towards the student."""
        config, size = self.config, len(inputs)
        origin = [self._surgery.source[name] for name in self.trained]
        with torch.no_grad():
            with self._as(origin):
                confidence = inputs.logits(self.model).float().softmax(-1).amax(-1).mean()
            views = config.augmentations if confidence < config.threshold else 0
            with self._as(self._teacher()):
                target = self._augmented(inputs) if views else inputs.logits(self.model)
        logits = inputs.logits(self.model)
        loss = symmetric_cross_entropy(logits, target).mean()
        skipped = self.descend(loss)
        if not skipped:
            self._follow()
            self._forget(origin)
        return Step(
            target,
            forwards=size * (2 + max(views, 1)),
            backwards=0 if skipped else size,
            losses={"consistency": loss},
            skipped=skipped,
        )

    def _augmented(self, inputs: Inputs) -> Tensor:
        """The teacher's logits, averaged over random views of the batch."""
        # torchvision takes as long to import as torch, and nothing else of the library needs it.
        from moetta.nn.augment import augment

        images = inputs.images
        if images is None:
            raise ValueError(
                "cotta's source model is unsure of this batch and would augment it, which needs "
                "images [B, C, H, W]; set threshold=0 for other inputs"
            )
        mean, std = self._pixel_scale(images)
        generator, pixels = self.generator(), images * std + mean
        total: Tensor | float = 0.0
        for _ in range(self.config.augmentations):
            view = (augment(pixels, generator) - mean) / std
            total = total + inputs.with_images(view).logits(self.model)
        return torch.as_tensor(total) / self.config.augmentations

    def _normalisation(self) -> tuple[Any, Any, str]:
        """Mean and standard deviation that the pixels were normalised by, and who says so."""
        if self.config.mean is not None:
            return self.config.mean, self.config.std, "mean= and std= give"
        own = getattr(self.network, "pretrained_cfg", None)
        own = own or getattr(self.network, "default_cfg", None) or {}
        return own.get("mean"), own.get("std"), "the model's configuration gives"

    def _pixel_scale(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """How the pixels were normalised, in a form to compute with."""
        mean, std, said = self._normalisation()
        if mean is None or std is None:
            raise ValueError(UNSAID)
        channels = images.shape[1]
        if {len(mean), len(std)} - {1, channels}:
            raise ValueError(
                f"the images have {channels} channels, but {said} {len(mean)} means and "
                f"{len(std)} deviations; pass mean= and std= with one number a channel"
            )
        shape = (1, -1, 1, 1)
        return images.new_tensor(mean).view(shape), images.new_tensor(std).view(shape)

    @torch.no_grad()
    def _follow(self) -> None:
        keep = self.config.decay
        for teacher, student in zip(self._teacher(), self.trained.values(), strict=True):
            teacher.mul_(keep).add_(student, alpha=1 - keep)

    @torch.no_grad()
    def _forget(self, origin: list[Tensor]) -> None:
        """Set a random few of the student's numbers back to the source's."""
        parameters = list(self.trained.values())
        ends = torch.tensor([p.numel() for p in parameters]).cumsum(0)
        generator = self.generator(1, device="cpu")
        chosen = bernoulli_positions(int(ends[-1]), self.config.restore, generator)
        cuts = torch.searchsorted(chosen, ends).tolist()
        for parameter, value, low, high, end in zip(
            parameters, origin, [0, *cuts], cuts, ends.tolist(), strict=False
        ):
            place = chosen[low:high] - (end - parameter.numel())
            index = torch.unravel_index(place.to(parameter.device), parameter.shape)
            parameter[index] = value[index]

    def merge(self) -> nn.Module:
        """The teacher, as a model of its own."""
        self._surgery.check_alive()
        with self._as(self._teacher()):
            return self._surgery.detached_copy()


@contextlib.contextmanager
def holding(parameters: list[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Within the block the parameters hold other values; nothing is copied.

    Only for passes without gradient.
    """
    kept = [p.data for p in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()  # it knows tensors by identity, not by value
        yield
    finally:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()


def symmetric_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Half of each one's cross-entropy against the other, by sample."""
    s, t = student.float().log_softmax(-1), teacher.detach().float().log_softmax(-1)
    return -0.5 * (t.exp() * s + s.exp() * t).sum(-1)


def bernoulli_positions(total: int, probability: float, generator: torch.Generator) -> Tensor:
    """The places, in order, where ``total`` independent coins of that probability fall heads.

    Draws the gaps between them, which are geometric: as many random numbers as there are heads,
    not as there are coins.
    """
    if probability == 0:
        return torch.empty(0, dtype=torch.long)
    scale = torch.log1p(torch.tensor(-probability, dtype=torch.float64))
    amount = int(total * probability + 6 * (total * probability) ** 0.5) + 16
    pieces, last = [], -1
    while last < total:
        uniform = 1 - torch.rand(amount, generator=generator, dtype=torch.float64)
        # A gap beyond the end is as good as any other: clamp before it overflows an integer.
        gaps = (uniform.log() / scale).floor().clamp(max=float(total)).long() + 1
        pieces.append(gaps.cumsum(0) + last)
        last = int(pieces[-1][-1])
    places = torch.cat(pieces)
    return places[places < total]


register("cotta", CoTTAConfig, CoTTA, "a slow teacher, random views, random forgetting")
