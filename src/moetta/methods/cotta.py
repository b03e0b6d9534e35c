"""CoTTA: learn from a slow teacher, now and then forget a little (Wang et al., 2022)."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import positive, share
from moetta.core.functional import symmetric_cross_entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import SGDConfig
from moetta.core.objective import Objective
from moetta.core.pixels import PixelConfig, Pixels
from moetta.core.teacher import Teacher, holding
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.norms import BatchStatNorm, describe


@dataclass(frozen=True)
class CoTTAConfig(PixelConfig, SGDConfig):
    """CoTTA.

    Attributes:
        seed: seed of the augmentations and of the forgetting.
        threshold: if the source model's mean confidence on a batch is below this, the teacher
            looks at augmented views. The authors' rule for models other than ImageNet's: the 5 %
            quantile of the confidence on source images, minus 0.05. 0 never augments.
        augmentations: how many views the teacher's logits are then averaged over.
        decay: how much of its weights the teacher keeps at each step.
        restore: probability with which each trained number returns to its source value.
    """

    lr: float = 1e-3
    threshold: float = 0.1
    augmentations: int = 32
    decay: float = 0.999
    restore: float = 0.001

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "augmentations")
        share(self, "threshold", "decay", "restore")


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
    needs="images",
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
            raise ValueError("cotta trains weights and biases, but this model has none")
        parameters = self.make_trainable(chosen)
        self.optimizer = self.config.sgd(parameters)
        # Untrained values are the same in all three; the teacher keeps only the trained ones.
        self.teacher = Teacher(self)
        self.pixels = Pixels(self, self.config, "set threshold=0, which never augments")
        if self.config.threshold > 0 and not self.pixels.known:
            # An uncertain batch may come late in a run, and would then stop it.
            unsure = f"once the mean confidence in a batch falls below {self.config.threshold}, "
            warnings.warn(unsure + self.pixels.unknown(), stacklevel=4)

    def _origin(self) -> list[Tensor]:
        return [self.surgery.source[name] for name in self.trained]

    def _as_source(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the network is the source model."""
        return holding(list(self.trained.values()), self._origin())

    def predict(self, inputs: Inputs) -> Tensor:
        """The teacher's prediction."""
        with self.teacher.answering():
            return inputs.logits(self.model)

    def objective(self, inputs: Inputs) -> Objective:
        """How far the student's prediction is from the teacher's."""
        config = self.config
        with torch.no_grad():
            with self._as_source():
                confidence = inputs.logits(self.model).float().softmax(-1).amax(-1).mean()
            views = config.augmentations if confidence < config.threshold else 0
            with self.teacher.answering():
                target = self._augmented(inputs) if views else inputs.logits(self.model)
        self.predicted(target)  # the student's pass follows
        loss = symmetric_cross_entropy(inputs.logits(self.model), target).mean()
        passes = 2 + max(views, 1)
        return Objective(target, {"consistency": loss}, forwards=len(inputs) * passes)

    def after_step(self, objective: Objective) -> None:
        """The teacher follows the student; the student forgets a little."""
        self.teacher.follow(self.config.decay)
        self._forget(self._origin())

    def _augmented(self, inputs: Inputs) -> Tensor:
        """The teacher's logits, averaged over random views of the batch."""
        # torchvision takes long to import, and no other method needs it.
        from moetta.nn.augment import augment

        generator, total = self.generator(), torch.zeros((), device=self.device)
        for _ in range(self.config.augmentations):
            view = self.pixels.changed(inputs, lambda x: augment(x, generator, share=inputs.share))
            total = total + view.logits(self.model)
        return total / self.config.augmentations

    @torch.no_grad()
    def _forget(self, origin: list[Tensor]) -> None:
        """Reset a few of the student's numbers, at random, to their source values."""
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
        with self.lock, self.teacher.answering():
            return super().merge()


def bernoulli_positions(total: int, probability: float, generator: torch.Generator) -> Tensor:
    """Which of ``total`` independent coins with that probability come up heads, in order.

    Draws the gaps between heads, which are geometric: one random number per head, not per coin.
    """
    if probability == 0:
        return torch.empty(0, dtype=torch.long)
    scale = torch.log1p(torch.tensor(-probability, dtype=torch.float64))
    amount = int(total * probability + 6 * (total * probability) ** 0.5) + 16
    pieces, last = [], -1
    while last < total:
        uniform = 1 - torch.rand(amount, generator=generator, dtype=torch.float64)
        # Gaps beyond the end are all equal: clamp before one overflows an integer.
        gaps = (uniform.log() / scale).floor().clamp(max=float(total)).long() + 1
        pieces.append(gaps.cumsum(0) + last)
        last = int(pieces[-1][-1])
    places = torch.cat(pieces)
    return places[places < total]
