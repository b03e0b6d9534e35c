"""The embedded benchmark: the paper's streams in miniature, with nothing to download.

Two-digit numbers composed of scikit-learn's handwritten digits, 100 classes, 32 x 32 pixels. Each
of the paper's data sets has a counterpart:

========  ==========================  ====================================================
domain    in the paper                here
========  ==========================  ====================================================
c/NAME    ImageNet-C, 15 corruptions  the same corruptions with CIFAR-10-C's constants
r         ImageNet-R                  six styles that no shipped model was trained on
sketch    ImageNet-Sketch             pencil outlines on paper
a         ImageNet-A                  clean images that an independent model got wrong
clean     ImageNet val                clean images of digits not used in training
extra/..  the 4 extra corruptions     the validation stream, on which settings are chosen
========  ==========================  ====================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moetta.data.catalogue import stream_spec
from moetta.data.domains import Domain
from moetta.data.embedded.compose import CLASSES, SIZE, photographs
from moetta.data.embedded.compositions import domain, domain_names, usual_count
from moetta.data.orders import Order, apportion
from moetta.data.streams import Stream

__all__ = [
    "CLASSES",
    "MEAN",
    "SIZE",
    "STD",
    "domain",
    "domain_names",
    "domains",
    "source_images",
    "stream",
]

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def domains(name: str, *, severity: int = 5, length: int | None = None) -> list[Domain]:
    """The domains of a stream: "classical", "potpourri", "potpourri+" or "validation".

    Args:
        name: The stream.
        severity: Severity of the corruptions.
        length: How many images they have in total, in the usual proportions.
    """
    names = domain_names(stream_spec(name).parts)
    if length is None:
        return [domain(part, severity=severity) for part in names]
    usual = [usual_count(part) for part in names]
    counts = apportion([n / sum(usual) for n in usual], length)
    if min(counts) < 1:
        raise ValueError(
            f"length must allow one image for each of the {len(names)} domains, got {length}"
        )
    return [domain(part, severity=severity, count=n) for part, n in zip(names, counts, strict=True)]


def stream(
    name: str,
    *,
    seed: int = 42,
    batch_size: int = 64,
    limit: int | None = None,
    length: int | None = None,
    order: str | Order = "mixed",
    severity: int = 5,
    **options: Any,
) -> Stream:
    """A stream of the paper in miniature; see `moetta.data.Stream` for its arguments.

    Args:
        name: "classical" (14,400 images), "potpourri" (16,097), "potpourri+" (17,057), or
            "validation" (14,400), on which hyper-parameters are chosen.
        seed: Seeds the order and the choice made by ``limit``; the images do not depend on it.
        batch_size: Images per batch.
        limit: Draws a stratified subset of this many images.
        length: Makes the stream this long, in the usual proportions. Beyond the usual length
            further images are composed as they are needed: none repeats, and memory does not grow
            with the length, but reading takes longer.
        order: How domains arrive.
        severity: Severity of the corruptions.
        **options: Further options of `Stream`: workers, start.
    """
    return Stream(
        domains(name, severity=severity, length=length),
        order=order,
        seed=seed,
        batch_size=batch_size,
        limit=limit,
        length=length,
        normalise=(MEAN, STD),
        name=stream_spec(name).card_name,
        **options,
    )


def source_images(n: int, seed: int = 0) -> Tensor:
    """Clean images like those the shipped models were trained on: float32 [n, 3, 32, 32].

    For methods that look at source images before they start, such as EATA (Fisher information) and
    MGTTA (statistics). The images are normalised and show training digits, in compositions that are
    not used elsewhere.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    images, _ = photographs(torch.arange(n), split="train", seed=1_000_000 + seed)
    return (images.float() / 255 - MEAN[0]) / STD[0]
