"""CoTTA: learn from a slow teacher, now and then forget a little (Wang et al., 2022)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import positive, require, share
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import SGDConfig
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.norms import BatchStatNorm, describe

UNKNOWN_PIXELS = (
    "cotta augments un-normalised pixels, but this model does not say how its inputs are "
    "normalised: pass mean= and std= (one number per channel), or threshold=0 to turn "
    "augmentation off"
)


@dataclass(frozen=True)
class CoTTAConfig(SGDConfig):
    """CoTTA.

    Attributes:
        seed: seed of the augmentations and of the forgetting.
        threshold: if the source model's mean confidence on a batch is below this, the teacher
            looks at augmented views. The authors' rule for models other than ImageNet's: the 5 %
            quantile of the confidence on source images, minus 0.05. 0 never augments.
        augmentations: how many views the teacher's logits are then averaged over.
        decay: how much of its weights the teacher keeps at each step.
        restore: probability with which each trained number returns to its source value.
        mean: the mean that was subtracted from the pixels, by channel, so that augmentation can
            undo it; None reads it from a timm model's configuration.
        std: the standard deviation that the pixels were divided by; None as for the mean.
    """

    lr: float = 1e-3
    threshold: float = 0.1
    augmentations: int = 32
    decay: float = 0.999
    restore: float = 0.001
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def with_pixels(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Augmentation undoes the normalisation."""
        return self if self.mean is not None else replace(self, mean=mean, std=std)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "augmentations")
        share(self, "threshold", "decay", "restore")
        require((self.mean is None) == (self.std is None), "give both mean and std, or neither")
        require(not self.std or min(self.std) > 0, f"std must be above 0, got {self.std}")


@register(
    "cotta",
    CoTTAConfig,
    title="CoTTA",
    summary="follows a slow teacher, with random views and random forgetting",
    group="teacher",
    citation=Citation(
        "Wang, Qin and Fink, Olga and Van Gool, Luc and Dai, Dengxin",
        "Continual Test-Time Domain Adaptation",
        "CVPR",
        2022,
    ),
    drawn=Drawn("#0a7f96", "#4fcbe0", "v", "--"),
    cost="3 forwards (34 for uncertain batches), 1 backward",
    paper_row=3,
)
class CoTTA(Adapter[CoTTAConfig]):
    """A student that trains all weights and biases, and the teacher that follows it.

    The teacher answers. Its weights are running values. Teacher, student and the frozen source
    model (the anchor) share one network, which holds the weights of each in turn. `forwards`
    counts all three, including the anchor, which the paper's table leaves out.
    """

    def build(self, source: Source) -> None:
        """Train every weight and bias; the teacher starts as the source model."""
        for name, module in list(self.network.named_modules()):
            norm = describe(name, module)
            if norm is not None and norm.kind == "batch":
                self.surgery.replace(name, BatchStatNorm(module))
        named = list(self.network.named_parameters())
        chosen = [(n, p) for n, p in named if n.rpartition(".")[2] in ("weight", "bias")]
        if not chosen:
            raise ValueError("cotta trains weights and biases, and this model has none")
        parameters = self.make_trainable(chosen)
        self.optimizer = self.config.sgd(parameters)
        # What is not trained is the same in all three; the teacher keeps only what is.
        for name, parameter in chosen:
            self.running[f"teacher.{name}"] = parameter.detach().clone()
        if self.config.threshold > 0 and None in self._normalisation()[:2]:
            # An uncertain batch may come late in a run, and would end it.
            unsure = f"once the mean confidence in a batch falls below {self.config.threshold}, "
            warnings.warn(unsure + UNKNOWN_PIXELS, stacklevel=4)

    def _origin(self) -> list[Tensor]:
        return [self.surgery.source[name] for name in self.trained]

    def _teacher(self) -> list[Tensor]:
        values = [self.running[f"teacher.{name}"] for name in self.trained]
        return [value for value in values if value is not None]

    def _as(self, values: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        return holding(list(self.trained.values()), values)

    def predict(self, inputs: Inputs) -> Tensor:
        """The teacher's prediction."""
        with self._as(self._teacher()):
            return inputs.logits(self.model)

    def objective(self, inputs: Inputs) -> Objective:
        """How far the student's prediction is from the teacher's."""
        config = self.config
        with torch.no_grad():
            with self._as(self._origin()):
                confidence = inputs.logits(self.model).float().softmax(-1).amax(-1).mean()
            views = config.augmentations if confidence < config.threshold else 0
            with self._as(self._teacher()):
                target = self._augmented(inputs) if views else inputs.logits(self.model)
        self.predicted(target)  # the student's pass follows
        loss = symmetric_cross_entropy(inputs.logits(self.model), target).mean()
        passes = 2 + max(views, 1)
        return Objective(target, {"consistency": loss}, forwards=len(inputs) * passes)

    def after_step(self, objective: Objective) -> None:
        """The teacher follows the student; the student forgets a little."""
        self._follow()
        self._forget(self._origin())

    def _augmented(self, inputs: Inputs) -> Tensor:
        """The teacher's logits, averaged over random views of the batch."""
        # torchvision takes long to import, and no other method needs it.
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
        """How the pixels were normalised (mean, standard deviation), and who says so."""
        if self.config.mean is not None:
            return self.config.mean, self.config.std, "mean= and std= give"
        own = getattr(self.network, "pretrained_cfg", None)
        own = own or getattr(self.network, "default_cfg", None) or {}
        return own.get("mean"), own.get("std"), "the model's configuration gives"

    def _pixel_scale(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """How the pixels were normalised, in a form to compute with."""
        mean, std, said = self._normalisation()
        if mean is None or std is None:
            raise ValueError(UNKNOWN_PIXELS)
        channels = images.shape[1]
        if {len(mean), len(std)} - {1, channels}:
            raise ValueError(
                f"the images have {channels} channels, but {said} {len(mean)} means and "
                f"{len(std)} deviations; pass mean= and std= with one number per channel"
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
        """The teacher, as a separate model."""
        with self.lock, self._as(self._teacher()):
            return super().merge()


@contextlib.contextmanager
def holding(parameters: list[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Within the block the parameters hold other values; nothing is copied.

    Only for passes without gradients.
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
    """Half the cross-entropy of each against the other, by sample."""
    s, t = student.float().log_softmax(-1), teacher.detach().float().log_softmax(-1)
    return -0.5 * (t.exp() * s + s.exp() * t).sum(-1)


def bernoulli_positions(total: int, probability: float, generator: torch.Generator) -> Tensor:
    """Where ``total`` independent coins of that probability fall heads, in order.

    Draws the gaps between heads, which are geometric: one random number per head, not per coin.
    """
    if probability == 0:
        return torch.empty(0, dtype=torch.long)
    scale = torch.log1p(torch.tensor(-probability, dtype=torch.float64))
    amount = int(total * probability + 6 * (total * probability) ** 0.5) + 16
    pieces, last = [], -1
    while last < total:
        uniform = 1 - torch.rand(amount, generator=generator, dtype=torch.float64)
        # All gaps beyond the end are alike: clamp before one overflows an integer.
        gaps = (uniform.log() / scale).floor().clamp(max=float(total)).long() + 1
        pieces.append(gaps.cumsum(0) + last)
        last = int(pieces[-1][-1])
    places = torch.cat(pieces)
    return places[places < total]
