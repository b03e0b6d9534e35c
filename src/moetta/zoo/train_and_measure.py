"""From a recipe to a weights file and its card: trains, rounds to float16, measures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from moetta.core.functional import entropy
from moetta.data import embedded
from moetta.data.catalogue import SMALL_SETS
from moetta.data.corruptions import CLASSICAL, corrupt
from moetta.data.datasets import small_set
from moetta.data.embedded.compose import photographs
from moetta.data.image_files import ImageFiles
from moetta.files import write_atomically
from moetta.zoo.recipes import Recipe, recipe
from moetta.zoo.shipped_models import assemble
from moetta.zoo.trainer import Batches, Report, Trainer, epochs, normalise


def train_model(
    name: str,
    out: Path,
    *,
    data: Path | None = None,
    steps: int | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Trains a shipped model from its recipe, or resumes a training that was interrupted.

    Writes ``<name>.safetensors`` and ``<name>.json``, its card, to the output folder. Each is
    written atomically, the card last.

    Args:
        name: Which model.
        out: Folder for the weights, the card and, until they are done, the checkpoint.
        data: Folder of the training images, for models trained on CIFAR-10.
        steps: Fewer steps than the recipe's, to try it out; the card says so.
        report: Called after each step.

    Returns:
        The card.

    Raises:
        ValueError: There is no such recipe, a data folder is missing, or the output folder holds a
            checkpoint of another recipe.
        OSError: Training or test images are missing, or one cannot be read.
    """
    made_by = recipe(name)
    if steps is not None:
        if not 1 <= steps <= made_by.steps:
            raise ValueError(f"steps must be 1 to {made_by.steps}, got {steps}")
        made_by = replace(made_by, steps=steps)
    if made_by.data in SMALL_SETS:
        _photos(made_by, data, "test")  # fail now rather than after hours of training
    batches = training_batches(made_by, data)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f"{made_by.name}.checkpoint.safetensors"
    trainer = Trainer(made_by)
    if checkpoint.exists():
        trainer.load(checkpoint)
    trainer.fit(batches, checkpoint, report)
    found = finish(trainer, batches, out, data)
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
    """The images and labels of a data set of small images."""
    if data is None:
        title = SMALL_SETS[made_by.data].title
        raise ValueError(f"{made_by.name} is trained on {title}: name its folder with --data")
    domain = small_set(made_by.data, data, split)
    images = domain.images
    if isinstance(images, ImageFiles):  # some image cannot be read; reading them again names it
        images = images.in_memory()
    assert isinstance(images, Tensor)
    return images, domain.labels


def finish(
    trainer: Trainer, batches: Batches, out: Path, data: Path | None = None
) -> dict[str, Any]:
    """Writes the averaged weights as float16, and a card with the accuracy of these weights."""
    made_by = trainer.recipe
    weights = {
        key: value.half().contiguous() if value.is_floating_point() else value
        for key, value in trainer.averaged(batches).items()
    }
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
    """Accuracy in percent without adaptation: clean, and under each corruption at severity 5.

    Also the entropy of right and of wrong predictions: methods that learn from confident
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
    """The clean test set, then each corruption of it (for CIFAR-10, of every fifth image)."""
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
