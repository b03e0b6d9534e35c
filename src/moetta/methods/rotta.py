"""RoTTA: a balanced memory of recent samples, and a slow teacher (Yuan et al., 2023)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from moetta.core.adapter import Source
from moetta.core.config import Config, positive, share
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter
from moetta.core.objective import Step
from moetta.core.pixels import PixelConfig, Pixels
from moetta.core.teacher import Teacher
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.norms import (
    batch_moments,
    batch_norm,
    find_norms,
    trailing_activation,
    values_per_channel,
)


@dataclass(frozen=True)
class RoTTAConfig(PixelConfig, Config):
    """RoTTA.

    Attributes:
        seed: seed of the augmentation.
        lr: learning rate of Adam.
        memory: how many samples are kept, and after how many new ones a step is taken.
        decay: how much of its weights the teacher keeps at each step.
        statistics: share of the BatchNorm statistics that each step replaces by the memory's.
    """

    lr: float = 1e-3
    memory: int = 64
    decay: float = 0.999
    statistics: float = 0.05

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "lr", "memory")
        share(self, "decay", "statistics")


@dataclass
class Item:
    """What the memory knows about a sample.

    Attributes:
        label: the teacher's class.
        born: how many samples were seen before it.
        doubt: entropy of the teacher's prediction.
    """

    label: int
    born: int
    doubt: float


class Memory:
    """A few samples, balanced over the predicted classes; young and certain ones are preferred."""

    def __init__(self, size: int, classes: int, items: list[Item], seen: int) -> None:
        self.size, self.classes, self.items, self.seen = size, classes, items, seen

    def score(self, age: int, doubt: float) -> float:
        """How dispensable a sample is."""
        return 1 / (1 + math.exp(-age / self.size)) + doubt / math.log(self.classes)

    def place(self, label: int, doubt: float) -> int | None:
        """Keep a sample or drop it; returns the slot it went to."""
        slot = self._slot(label, doubt)
        if slot is not None:
            item = Item(label, self.seen, doubt)
            if slot == len(self.items):
                self.items.append(item)
            else:
                self.items[slot] = item
        self.seen += 1
        return slot

    def _slot(self, label: int, doubt: float) -> int | None:
        counts = Counter(item.label for item in self.items)
        if counts[label] < self.size / self.classes:
            if len(self.items) < self.size:
                return len(self.items)
            most = max(counts.values())
            crowded = {name for name, count in counts.items() if count == most}
        else:
            crowded = {label}
        scores = {
            slot: self.score(self.seen - item.born, item.doubt)
            for slot, item in enumerate(self.items)
            if item.label in crowded
        }
        worst = max(scores, key=lambda slot: scores[slot])
        return worst if scores[worst] > self.score(0, doubt) else None

    def ages(self) -> list[int]:
        """How long ago each sample came, in samples."""
        return [self.seen - item.born for item in self.items]


class SlowStatNorm(nn.Module):
    """A BatchNorm whose statistics move a little towards those of each batch it learns from."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.Module, share: float) -> None:
        super().__init__()
        assert isinstance(norm, _BatchNorm)
        self.weight, self.bias, self.eps, self.share = norm.weight, norm.bias, norm.eps, share
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        self.tail = trailing_activation(norm)
        self.learning = False
        self.mean: Tensor | None = None
        self.var: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, scale and shift."""
        mean = self.running_mean if self.mean is None else self.mean
        var = self.running_var if self.var is None else self.var
        if mean is None:  # no source statistics to start from
            return self._end(batch_norm(x, self.weight, self.bias, self.eps))
        if self.learning and values_per_channel(x) > 1:
            mean_b, var_b = batch_moments(x)
            mean = (1 - self.share) * mean + self.share * mean_b
            var = (1 - self.share) * var + self.share * var_b
            self.mean, self.var = mean.detach(), var.detach()
            shape = (1, -1, *[1] * (x.dim() - 2))
            y = (x - mean.view(shape)) * (var.view(shape) + self.eps).rsqrt()
            y = y * self.weight.view(shape) + self.bias.view(shape)
            return self._end(y)
        return self._end(F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps))

    def _end(self, y: Tensor) -> Tensor:
        done: Tensor = self.tail(y)
        return done


COLLECTING = "collecting samples for the next step"


@register(
    "rotta",
    RoTTAConfig,
    title="RoTTA",
    summary="learns from a balanced memory, after a slow teacher",
    group="teacher",
    citation=Citation(
        "Yuan, Longhui and Xie, Binhui and Li, Shuang",
        "Robust Test-Time Adaptation in Dynamic Scenarios",
        "CVPR",
        2023,
    ),
    drawn=Drawn("#4d7c0f", "#a3d65c", "p"),
    needs="images",
    cost="3 forwards, 1 backward",
)
class RoTTA(NormAffineAdapter[RoTTAConfig]):
    """The teacher predicts and fills the memory; the student learns from it; the teacher follows.

    There is one step per `memory` samples, at any batch size. Teacher and student share the
    BatchNorm statistics.
    """

    over_ranks = True

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(parameters, lr=self.config.lr)

    def build(self, source: Source) -> None:
        """Train the norm layers; the teacher starts as the source model."""
        self.slow: dict[str, SlowStatNorm] = {}
        norms = find_norms(self.network)
        parameters = self.make_trainable(pair for norm in norms for pair in norm.parameters())
        for norm in norms:
            if norm.kind == "batch":
                self.slow[norm.name] = SlowStatNorm(norm.module, self.config.statistics)
                self.surgery.replace(norm.name, self.slow[norm.name])
                for kind in ("mean", "var"):
                    value = getattr(norm.module, f"running_{kind}")
                    self.running[f"{kind}.{norm.name}"] = None if value is None else value.clone()
        self.optimizer = self.make_optimizer(parameters)
        self.teacher = Teacher(self)
        self.pixels = Pixels(self, self.config, "use another method")
        self.pixels.require_known()
        # Images [N, ...], and label, birth and doubt of each [N, 3]; a free slot has label -1.
        self.running |= {"images": None, "facts": None, "seen": None}

    def predict(self, inputs: Inputs) -> Tensor:
        """The teacher's prediction."""
        self._hand_over()
        with self.teacher.answering():
            return inputs.logits(self.model)

    def merge(self) -> nn.Module:
        """The teacher, as a separate model."""
        with self.lock, self.teacher.answering():
            self._hand_over()
            return super().merge()

    def learn(self, inputs: Inputs) -> Step:
        """Answer, remember, and step whenever enough samples have arrived."""
        images = inputs.images
        if images is None:
            raise ValueError("rotta remembers images and needs an image batch [B, C, H, W]")
        with torch.no_grad():
            logits = self.predict(inputs)
        self.predicted(logits)
        step = Step(logits, forwards=len(inputs), skipped=COLLECTING)
        p = logits.float().softmax(-1)
        if not torch.isfinite(p).all():
            step.skipped = "non-finite loss or gradient"
            return step
        doubts = -(p * (p + 1e-6).log()).sum(-1)
        images = inputs.whole(images)  # every rank keeps the same memory
        memory, store = self._remembered(images, p.shape[1])
        for place, (label, doubt) in enumerate(
            zip(p.argmax(-1).tolist(), doubts.tolist(), strict=True)
        ):
            slot = memory.place(label, doubt)
            if slot is not None:
                store[slot] = images[place]
            if memory.seen % self.config.memory == 0:
                self._step(step, memory, inputs.part(store[: len(memory.items)]))
        self._remember(memory, store)
        return step

    def _remembered(self, images: Tensor, classes: int) -> tuple[Memory, Tensor]:
        size, facts, store = self.config.memory, self.running["facts"], self.running["images"]
        seen = self.running["seen"]
        if facts is None or store is None or seen is None:
            store = images.new_zeros(size, *images.shape[1:])
            return Memory(size, classes, [], 0), store
        if store.shape[1:] != images.shape[1:]:
            raise ValueError(
                f"rotta remembers images of shape {tuple(store.shape[1:])}, and this batch has "
                f"{tuple(images.shape[1:])}; resize them, or call reset() first"
            )
        items = [Item(int(a), int(b), c) for a, b, c in facts.tolist() if a >= 0]
        return Memory(size, classes, items, int(seen)), store

    def _remember(self, memory: Memory, store: Tensor) -> None:
        facts = torch.full((memory.size, 3), -1.0, dtype=torch.float64)
        for slot, item in enumerate(memory.items):
            facts[slot] = torch.tensor([item.label, item.born, item.doubt], dtype=torch.float64)
        self.running["images"] = store
        self.running["facts"] = facts.to(store.device)
        self.running["seen"] = torch.tensor(memory.seen, device=store.device)

    def _step(self, step: Step, memory: Memory, batch: Inputs) -> None:
        """The student learns what the teacher says about the memory; young samples count more."""
        from moetta.nn.augment import augment  # torchvision takes long to import

        generator = self.generator()
        with torch.no_grad(), self.teacher.answering():
            target = batch.logits(self.model).float().softmax(-1)
        view = self.pixels.changed(batch, lambda x: augment(x, generator, share=batch.share))
        self._learning(True)
        try:
            student = view.logits(self.model)
        finally:
            self._learning(False)
        ages = torch.tensor(memory.ages(), dtype=torch.float32, device=target.device)
        weights = torch.sigmoid(-ages / memory.size)
        differences = -(target * student.float().log_softmax(-1)).sum(-1)
        loss = (weights * differences).mean()
        step.losses["memory"] = loss
        step.forwards += 2 * len(batch)
        failed = self.descend(loss)
        if failed is not None:
            self._hand_over()  # this pass's statistics are not kept
            step.skipped = step.skipped and failed  # an earlier step of this batch counts
            return
        step.skipped = None
        step.backwards += len(batch)
        for name, norm in self.slow.items():
            self.running |= {f"mean.{name}": norm.mean, f"var.{name}": norm.var}
        self.teacher.follow(self.config.decay)

    def _learning(self, on: bool) -> None:
        for norm in self.slow.values():
            norm.learning = on

    def _hand_over(self) -> None:
        """Give the BatchNorms their statistics; they may have been reset or loaded since."""
        for name, norm in self.slow.items():
            norm.mean, norm.var = self.running[f"mean.{name}"], self.running[f"var.{name}"]
