"""Trains a model from its recipe, reproducibly and resumably.

Every random draw of step ``t`` comes from a generator seeded with (recipe seed, t), so a resumed
training sees the same batches, augmentations and dropped paths as one that was not interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from moetta.files import read_safetensors, write_atomically
from moetta.zoo.muon import Muon, is_matrix
from moetta.zoo.recipes import Augment, Recipe

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Step number to (uint8 images [B, 3, H, W], labels [B])."""
Report = Callable[[int, float], None]
"""Called after each step with its number and its loss."""


def step_seed(seed: int, step: int) -> int:
    """A seed for a step, different from those of other steps and recipes."""
    return (seed * 0x9E3779B1 + step * 0x85EBCA6B + 0x27D4EB2F) % 2**63


def normalise(images: Tensor, recipe: Recipe) -> Tensor:
    """Turns uint8 pixels into the input of the recipe's model."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
    return (images.float() / 255 - mean) / std


def augment(images: Tensor, recipe: Augment, generator: torch.Generator) -> Tensor:
    """Augments a uint8 batch; the result is float in 0..255."""
    count, _, height, width = images.shape

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator).mul_(high - low).add_(low).view(-1, 1, 1, 1)

    x = images.float()
    if recipe.flip:
        x = torch.where(uniform(0, 1) < 0.5, x.flip(-1), x)
    if recipe.crop:
        pad = recipe.crop
        x = F.pad(x, (pad, pad, pad, pad), mode="reflect")
        top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator)
        rows = (top + torch.arange(height))[:, None, :, None]
        columns = (left + torch.arange(width))[:, None, None, :]
        x = x[
            torch.arange(count)[:, None, None, None], torch.arange(3)[:, None, None], rows, columns
        ]
    if recipe.brightness or recipe.contrast or recipe.saturation:
        grey = x.mean(1, keepdim=True)
        x = grey + (x - grey) * (1 + uniform(-recipe.saturation, recipe.saturation))
        centre = x.mean((1, 2, 3), keepdim=True)
        x = centre + (x - centre) * (1 + uniform(-recipe.contrast, recipe.contrast))
        x = (x + 255 * uniform(-recipe.brightness, recipe.brightness)).clamp_(0, 255)
    if recipe.cutout:
        top, left = (uniform(0, size - 1) for size in (height, width))
        half = recipe.cutout / 2
        hole = (torch.arange(height).view(1, 1, -1, 1) - top).abs() < half
        hole = hole & ((torch.arange(width).view(1, 1, 1, -1) - left).abs() < half)
        hole = hole & (uniform(0, 1) < 0.5)
        x = torch.where(hole, x.mean((2, 3), keepdim=True), x)
    return x


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step: linear warm-up, then a cosine to zero."""
    warm = max(1, round(recipe.warmup * recipe.steps))
    if step < warm:
        return recipe.lr * (step + 1) / warm
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


def objective(logits: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy; with ``parts``, plus the cross-entropies of the tens and of the units."""
    loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    if recipe.parts:
        joint = logits.log_softmax(1).view(-1, 10, 10)
        loss = loss + F.nll_loss(joint.logsumexp(2), labels // 10)
        loss = loss + F.nll_loss(joint.logsumexp(1), labels % 10)
    return loss


def optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the matrices and AdamW for the others.

    Only parameters with more than one dimension decay.
    """
    matrices: dict[str, nn.Parameter] = {}
    if recipe.optimiser == "muon":
        matrices = {k: p for k, p in model.named_parameters() if is_matrix(k, p)}
    others = [p for k, p in model.named_parameters() if k not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in others if p.ndim <= 1]},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=0.0)]
    if matrices:
        found.append(Muon(matrices.values(), recipe.lr, recipe.weight_decay))
    return found


class Trainer:
    """The state of one training: network, its moving average, optimisers, step and losses."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = recipe.shape.build(recipe.classes)
        self.average = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.optimisers = optimisers(self.model, recipe)
        self.step = 0
        self.first_losses: list[float] = []

    def _batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        """A step's images, augmented, and their labels."""
        images, labels = batches(step)
        generator = torch.Generator().manual_seed(step_seed(self.recipe.seed, step))
        return augment(images, self.recipe.augment, generator), labels

    def advance(self, batches: Batches) -> float:
        """Takes one optimiser step and returns its loss."""
        recipe, seed = self.recipe, step_seed(self.recipe.seed, self.step)
        images, labels = self._batch(batches, self.step)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(recipe, self.step)
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # drop-path draws from the global generator
            logits = self.model(normalise(images, recipe))
        loss = objective(logits, labels, recipe)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        decay = min(recipe.ema, self.step / (self.step + 10))
        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                if value.is_floating_point():  # BatchNorm also counts its batches
                    self.average[key].lerp_(value, 1 - decay)
        if len(self.first_losses) < 5:
            self.first_losses.append(loss.item())
        return loss.item()

    def averaged(self, batches: Batches, count: int = 100) -> dict[str, Tensor]:
        """The averaged weights; BatchNorm's statistics are those of the last training batches.

        An average of the statistics that BatchNorm kept on the way would be of other weights, so
        they are measured again, with the averaged weights.
        """
        with torch.random.fork_rng(devices=[]):
            model = self.recipe.shape.build(self.recipe.classes).eval()
        model.load_state_dict(self.average)
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over the batches
            norm.train()
        for step in range(max(0, self.step - count), self.step) if norms else ():
            with torch.no_grad():
                model(normalise(self._batch(batches, step)[0], self.recipe))
        return model.state_dict()

    def save(self, path: Path) -> None:
        """Writes a checkpoint, atomically."""
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"average/{k}": v for k, v in self.average.items()}
        for o, optimiser in enumerate(self.optimisers):
            for i, state in optimiser.state_dict()["state"].items():
                tensors |= {f"optimiser/{o}/{i}/{k}": torch.as_tensor(v) for k, v in state.items()}
        tensors["first_losses"] = torch.tensor(self.first_losses, dtype=torch.float64)
        tensors = {k: v.detach().contiguous().clone() for k, v in tensors.items()}
        meta = {"step": str(self.step), "recipe": repr(self.recipe)}
        write_atomically(path, to_bytes(tensors, meta))

    def load(self, path: Path) -> None:
        """Loads a checkpoint of the same recipe; refuses any other."""
        tensors, meta = read_safetensors(path)
        if meta.get("recipe") != repr(self.recipe):
            raise ValueError(
                f"{path} belongs to another recipe; remove it or choose another output folder"
            )
        self.step = int(meta["step"])
        self.first_losses = tensors.pop("first_losses").tolist()
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimisers]
        for key, value in tensors.items():
            kind, rest = key.split("/", 1)
            if kind == "optimiser":
                which, index, name = rest.split("/")
                states[int(which)].setdefault(int(index), {})[name] = value
            else:
                groups[kind][rest] = value
        self.model.load_state_dict(groups["model"])
        self.average = groups["average"]
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})

    def fit(self, batches: Batches, checkpoint: Path | None, report: Report | None = None) -> None:
        """Trains to the recipe's last step, saving a checkpoint every minute."""
        saved = time.monotonic()
        while self.step < self.recipe.steps:
            loss = self.advance(batches)
            if report:
                report(self.step, loss)
            if checkpoint and (time.monotonic() - saved > 60 or self.step == self.recipe.steps):
                self.save(checkpoint)
                saved = time.monotonic()


def epochs(images: Tensor, labels: Tensor, batch_size: int, seed: int) -> Batches:
    """Batches of a data set in memory: a new permutation per epoch, short batches dropped."""
    per_epoch = len(images) // batch_size
    if per_epoch == 0:
        raise ValueError(f"a batch needs {batch_size} images, but there are only {len(images)}")
    order: tuple[int, Tensor] = (-1, labels)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        nonlocal order
        epoch, place = divmod(step, per_epoch)
        if order[0] != epoch:
            generator = torch.Generator().manual_seed(step_seed(seed, -1 - epoch))
            order = (epoch, torch.randperm(len(images), generator=generator))
        chosen = order[1][place * batch_size : (place + 1) * batch_size]
        return images[chosen], labels[chosen]

    return batch
