"""From a recipe to a weights file with its card: training, rounding, measuring."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from moetta.core.functional import entropy
from moetta.data import embedded
from moetta.data.corruptions import CLASSICAL, corrupt
from moetta.data.datasets import cifar10
from moetta.data.embedded.compose import photographs
from moetta.data.image_files import ImageFiles
from moetta.files import write_atomically
from moetta.zoo.recipes import Recipe, recipe
from moetta.zoo.shipped import assemble
from moetta.zoo.training import Batches, Trainer, epochs, normalise


@dataclass(frozen=True)
class TrainSource:
    """Train a small source model from its recipe, as the shipped ones were."""

    name: tyro.conf.Positional[str]
    """digits-vit, digits-convnext, cifar-vit or cifar-convnext."""
    out: Path = Path("sources")
    """Folder for the weights, the card and, until they are done, the checkpoint."""
    data: Path | None = None
    """For CIFAR-10: the folder that holds it, as image files or as torchvision stores it."""
    steps: int | None = None
    """Fewer steps than the recipe's, to try it; the card says so."""


def train(options: TrainSource, *, progress: bool = True) -> dict[str, Any]:
    """Trains, or resumes a training that was interrupted; gives the card.

    Writes ``<name>.safetensors`` and ``<name>.json`` to the output folder, each whole or not at
    all, the card last.

    Raises:
        ValueError: No such recipe, no data folder where one is needed, or the output folder holds a
            checkpoint of another recipe.
        OSError: The training or test images are not there, or one cannot be read.
    """
    made_by = recipe(options.name)
    if options.steps is not None:
        if not 1 <= options.steps <= made_by.steps:
            raise ValueError(f"steps must be 1 to {made_by.steps}, got {options.steps}")
        made_by = replace(made_by, steps=options.steps)
    if made_by.data == "cifar10":
        # A fault there must not show after hours of training.
        _photos(made_by, options.data, "test")
    batches = training_batches(made_by, options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / f"{made_by.name}.checkpoint.safetensors"
    trainer = Trainer(made_by)
    if checkpoint.exists():
        trainer.load(checkpoint)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=not progress) as bar:
        task = bar.add_task(made_by.name, total=made_by.steps, completed=trainer.step)

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"{made_by.name} loss {loss:.3f}")

        trainer.fit(batches, checkpoint, report)
    found = finish(trainer, options.out, options.data)
    checkpoint.unlink(missing_ok=True)
    return found


def training_batches(made_by: Recipe, data: Path | None) -> Batches:
    """The batches that a recipe trains on."""
    size = made_by.batch_size
    if made_by.data == "digits":
        return lambda step: photographs(
            torch.arange(step * size, (step + 1) * size), split="train", seed=made_by.seed
        )
    return epochs(*_photos(made_by, data, "train"), size, made_by.seed)


def _photos(
    made_by: Recipe, data: Path | None, split: Literal["train", "test"]
) -> tuple[Tensor, Tensor]:
    """The images and labels of CIFAR-10."""
    if data is None:
        raise ValueError(f"{made_by.name} is trained on CIFAR-10: name its folder with --data")
    domain = cifar10(data, split)
    images = domain.images
    if isinstance(images, ImageFiles):  # one cannot be read: reading them again says which
        images = images.in_memory()
    assert isinstance(images, Tensor)
    return images, domain.labels


def finish(trainer: Trainer, out: Path, data: Path | None = None) -> dict[str, Any]:
    """Writes the averaged weights as float16, measures what was written, writes the card."""
    made_by = trainer.recipe
    weights = {key: value.half().contiguous() for key, value in trainer.average.items()}
    raw = to_bytes(weights)
    model = assemble(made_by, weights)
    found = {
        "name": made_by.name,
        "recipe": made_by.as_dict(),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "bytes": len(raw),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_losses": [round(loss, 6) for loss in trainer.first_losses],
        "torch": torch.__version__.split("+")[0],
        **measure(model, made_by, data),
    }
    write_atomically(out / f"{made_by.name}.safetensors", raw)
    write_atomically(out / f"{made_by.name}.json", (json.dumps(found, indent=1) + "\n").encode())
    return found


def measure(model: nn.Module, made_by: Recipe, data: Path | None = None) -> dict[str, Any]:
    """Accuracy in per cent: clean and under each corruption at severity 5, without adaptation.

    Entropy is given too, of right and of wrong predictions: methods that learn from confident
    predictions need the two to differ.
    """
    accuracy: dict[str, float] = {}
    entropies: dict[str, dict[str, float]] = {}
    for name, images, labels in _test_sets(made_by, data):
        with torch.inference_mode():
            logits = torch.cat([model(normalise(x, made_by)) for x in images.split(250)])
        right, uncertain = logits.argmax(1) == labels, entropy(logits)
        accuracy[name] = round(100 * right.float().mean().item(), 2)
        entropies[name] = {
            "right": round(uncertain[right].mean().item(), 3),
            "wrong": round(uncertain[~right].mean().item(), 3),
        }
    corrupted = [accuracy[name] for name in CLASSICAL]
    mean = round(sum(corrupted) / len(corrupted), 2)
    return {"accuracy": accuracy, "mean_corrupted": mean, "entropy": entropies}


def _test_sets(made_by: Recipe, data: Path | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The clean test set, then each corruption of it (for CIFAR-10, of every fifth picture)."""
    if made_by.data == "digits":
        for name in ("clean", *embedded.domain_names(["c"])):
            domain = embedded.domain(name)
            assert isinstance(domain.images, Tensor)
            yield name.removeprefix("c/"), domain.images, domain.labels
        return
    images, labels = _photos(made_by, data, "test")
    yield "clean", images, labels
    index = torch.arange(0, len(labels), 5)
    for name in CLASSICAL:
        yield name, corrupt(images[index], name, 5, index=index), labels[index]
