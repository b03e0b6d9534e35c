"""The hostile streams of `guard.py`; what each one is, is said there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetta import zoo
from moetta.data import cifar10, corrupted, embedded, stream
from moetta.data.corruptions import CLASSICAL

BLOCK = 16  # batches
VIT_TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"

Batches = Iterator[tuple[Tensor, Tensor]]  # images, labels; label -1 is not scored


@cache
def digits(order: str, seed: int) -> tuple[Tensor, Tensor]:
    """The images and labels of the embedded classical stream, in order."""
    if order == "clean":
        shuffled = torch.randperm(3600, generator=torch.Generator().manual_seed(seed))
        clean = embedded.domain("clean", count=3600)
        images = clean.read(shuffled)[0]
        return (images.float() / 255 - embedded.MEAN[0]) / embedded.STD[0], clean.labels[shuffled]
    found = list(embedded.stream("classical", order=order, seed=seed))
    return torch.cat([b.images for b in found]), torch.cat([b.labels for b in found])


def split(images: Tensor, labels: Tensor, size: int = 64) -> Batches:
    """In batches."""
    return zip(images.split(size), labels.split(size), strict=True)


def interrupted(junk: Callable[[torch.Generator], Tensor], seed: int) -> Batches:
    """Ordinary traffic in which every second block is junk."""
    generator = torch.Generator().manual_seed(seed)
    for number, (images, labels) in enumerate(split(*digits("mixed", seed))):
        if number % BLOCK == 0 and number:
            for _ in range(BLOCK):
                yield junk(generator), torch.full((64,), -1)
        yield images, labels


def noise(generator: torch.Generator) -> Tensor:
    """Normal noise."""
    return torch.randn(64, 3, 32, 32, generator=generator)


def constant(generator: torch.Generator) -> Tensor:
    """Images of one grey each."""
    return torch.randn(64, 1, 1, 1, generator=generator).expand(64, 3, 32, 32).clone()


def poisoned(model: str, seed: int) -> Batches:
    """Half of each batch is the source model's most confident error."""
    images, labels = digits("mixed", seed)
    with torch.no_grad():
        confidence, predicted = zoo.load(model)(images[:1000]).softmax(1).max(1)
    worst = images[torch.where(predicted != labels[:1000], confidence, 0).argmax()]
    for part, right in split(images, labels, 32):
        copies = worst.expand(len(part), -1, -1, -1)
        yield torch.cat((part, copies)), torch.cat((right, torch.full((len(copies),), -1)))


class Cifar:
    """The corrupted test images of CIFAR-10, made once, and some source images.

    Args:
        data: the folder of CIFAR-10.
        cache: a folder that keeps the corrupted images from one call to the next.
    """

    def __init__(self, data: Path, cache: Path | None) -> None:
        clean = cifar10(data, "test")
        file = None if cache is None else cache / "cifar10-c.npy"
        if file is not None and file.exists():
            self.images = np.load(file, mmap_mode="r")
        else:
            rows = torch.arange(len(clean)).split(1000)
            parts = [d.read(part)[0] for d in corrupted(clean, CLASSICAL) for part in rows]
            self.images = torch.cat(parts).numpy()
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                np.save(file, self.images)
        self.labels = clean.labels.repeat(len(CLASSICAL))
        train = cifar10(data, "train")
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:2000]
        self.source = train.read(chosen)[0]

    def batches(self, stream: str, model: str, seed: int) -> Batches:
        """The whole, or one class of it (by the seed), shuffled."""
        index = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        if stream == "one-class":
            index = index[self.labels[index] == seed % 10]
        for part in index.split(64):
            images = torch.from_numpy(np.ascontiguousarray(self.images[part.numpy()]))
            yield normalised(images, model), self.labels[part]


def normalised(images: Tensor, model: str) -> Tensor:
    """As the model expects them."""
    recipe = zoo.recipe(model)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
    return (images.float() / 255 - mean) / std


class Photos:
    """A part of ImageNet's validation set under 15 corruptions at severity 3, and its model.

    Args:
        data: a folder of photos by class.
        weights: the model's safetensors file.
        count: images in the stream.
    """

    def __init__(self, data: Path, weights: Path, count: int) -> None:
        self._data, self._weights, self._count = data, weights, count

    def model(self) -> nn.Module:
        """ViT-Tiny."""
        model = timm.create_model(VIT_TINY)
        model.load_state_dict(load_file(self._weights))
        return model.eval()

    def batches(self, seed: int) -> Batches:
        """Mixed corruptions."""
        found = stream(
            "classical", self._data, model=VIT_TINY,
            severity=3, partial=True, limit=self._count, seed=seed,
        )  # fmt: skip
        for batch in found:
            yield batch.images, batch.labels


def digit_batches(name: str, model: str, size: int, seed: int) -> Batches:
    """A stream of the digit models, by its name without a number."""
    if name in ("noise", "constant"):
        return interrupted(noise if name == "noise" else constant, seed)
    if name == "poison":
        return poisoned(model, seed)
    orders = {"sudden": "continual", "clean": "clean"}
    images, labels = digits(orders.get(name, "mixed"), seed)
    if name == "return":
        clean, right = digits("clean", seed)
        return split(torch.cat((clean, images, clean)), torch.cat((right, labels, right)))
    if name == "bursts":
        by_class = labels.argsort(stable=True)
        return split(images[by_class], labels[by_class])
    if name == "batch":
        return split(images[:3600], labels[:3600], size)
    if name == "short":
        return split(images[: 20 * 64], labels[: 20 * 64])
    return split(images, labels)
