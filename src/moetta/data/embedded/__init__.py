"""The embedded benchmark: the paper's streams in miniature, with nothing to download.

Two-digit numbers composed of scikit-learn's handwritten digits, 100 classes, 32 x 32 pixels. Each
of the paper's data sets has a counterpart:

========  ==========================  ===============================================
domain    in the paper                here
========  ==========================  ===============================================
c/NAME    ImageNet-C, 15 corruptions  the same corruptions with CIFAR-10-C's constants
r         ImageNet-R                  six styles that no source model was trained on
sketch    ImageNet-Sketch             outlines in pencil on paper
a         ImageNet-A                  clean pictures that another model got wrong
clean     ImageNet val                clean pictures of digits not used in training
extra/..  the 4 extra corruptions     the validation stream, on which settings are chosen
========  ==========================  ===============================================
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from moetta.data.corruptions import CLASSICAL, EXTRA, corrupt
from moetta.data.domains import Domain
from moetta.data.embedded.compose import CLASSES, SIZE, photographs, scene
from moetta.data.embedded.store import Pictures, cached
from moetta.data.embedded.styles import rendition, sketch
from moetta.data.orders import Order
from moetta.data.streams import Stream
from moetta.suggest import nearest

__all__ = [
    "CLASSES",
    "COUNTS",
    "MEAN",
    "SIZE",
    "STD",
    "STREAMS",
    "domain",
    "domains",
    "source_images",
    "stream",
]

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

COUNTS = {"c": 960, "r": 576, "sketch": 977, "a": 144, "clean": 960, "extra": 3600}
"""Pictures in each domain. The first five keep the paper's proportions (50,000 : 30,000 : 50,889 :
7,500 : 50,000); the validation stream is made as long as the classical one, so that a learning
rate chosen on it suits a stream of that length."""

STREAMS: dict[str, tuple[str, ...]] = {
    "classical": tuple(f"c/{name}" for name in CLASSICAL),
    "validation": tuple(f"extra/{name}" for name in EXTRA),
}
STREAMS["potpourri"] = (*STREAMS["classical"], "r", "sketch", "a")
STREAMS["potpourri+"] = (*STREAMS["potpourri"], "clean")

# Compositions of the test digits, one seed for each purpose.
_CLEAN, _EXTRA, _RENDITION, _SKETCH, HARD_SEED = 101, 102, 103, 104, 105


@cache
def hard_cases() -> Tensor:
    """Which of the compositions with `HARD_SEED` the independent model got wrong."""
    text = files("moetta.data.embedded").joinpath("hard.json").read_text()
    return torch.tensor(json.loads(text)["index"][: COUNTS["a"]])


def _make(name: str, severity: int) -> Pictures:
    kind, _, corruption = name.partition("/")
    index = torch.arange(COUNTS[kind])
    if kind in ("r", "sketch"):
        seed, paint = (_RENDITION, rendition) if kind == "r" else (_SKETCH, sketch)
        view = scene(index, split="test", seed=seed)
        return paint(view), view.labels
    if kind == "a":
        return photographs(hard_cases(), split="test", seed=HARD_SEED)
    images, labels = photographs(index, split="test", seed=_EXTRA if kind == "extra" else _CLEAN)
    return (corrupt(images, corruption, severity, index=index) if corruption else images), labels


def domain(name: str, *, severity: int = 5) -> Domain:
    """One domain of the benchmark, made or read from the cache.

    Args:
        name: "c/" and one of the 15 corruptions, "extra/" and one of the 4 others, "r", "sketch",
            "a" or "clean".
        severity: Of the corruption, 1 to 5.
    """
    known = (*STREAMS["potpourri+"], *STREAMS["validation"])
    if name not in known:
        raise ValueError(
            f"the embedded benchmark has no domain {name!r}; it has {', '.join(known)}"
        )
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1 to 5, got {severity!r}")
    corrupted = "/" in name
    stem = name.replace("/", "-") + (f"-{severity}" if corrupted else "")
    images, labels = cached(stem, lambda: _make(name, severity))
    origin = "embedded digits" + (f", severity {severity}" if corrupted else "")
    return Domain(name, images, labels, origin=origin)


def domains(name: str, *, severity: int = 5) -> list[Domain]:
    """The domains of a stream: "classical", "potpourri", "potpourri+" or "validation"."""
    if name not in STREAMS:
        raise ValueError(f"no embedded stream {name!r}; {nearest(name, STREAMS)}")
    return [domain(part, severity=severity) for part in STREAMS[name]]


def stream(
    name: str,
    *,
    seed: int = 42,
    batch_size: int = 64,
    limit: int | None = None,
    order: str | Order = "mixed",
    severity: int = 5,
    **options: Any,
) -> Stream:
    """A stream of the paper in miniature; see `moetta.data.Stream` for its arguments.

    Args:
        name: "classical" (14,400 pictures), "potpourri" (16,097), "potpourri+" (17,057), or
            "validation" (14,400), on which hyper-parameters are chosen.
        seed: Of the order and the choice made by ``limit``; the pictures do not depend on it.
        batch_size: Pictures in a batch.
        limit: Draws a stratified subset.
        order: How domains arrive.
        severity: Of the corruptions.
        **options: Further options of `Stream`: workers, start.
    """
    return Stream(
        domains(name, severity=severity),
        order=order,
        seed=seed,
        batch_size=batch_size,
        limit=limit,
        normalise=(MEAN, STD),
        name=f"embedded-{name}",
        **options,
    )


def source_images(n: int, seed: int = 0) -> Tensor:
    """Clean pictures as the source models were trained on: float32 [n, 3, 32, 32], normalised.

    They show training digits only, in compositions of their own: for the methods that look at the
    source once before they start (EATA's Fisher information, MGTTA's statistics).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    images, _ = photographs(torch.arange(n), split="train", seed=1_000_000 + seed)
    return (images.float() / 255 - MEAN[0]) / STD[0]
