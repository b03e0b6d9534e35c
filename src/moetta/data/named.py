"""The paper's streams by name, from the folders that a user has."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from moetta.data.corruptions import CLASSICAL, EXTRA
from moetta.data.datasets import (
    IMAGENET,
    IMAGENET_C_FOLDERS,
    IMAGENET_C_FRAME,
    cifar10,
    corrupted,
    imagenet,
    imagenet_c,
    is_there,
)
from moetta.data.domains import Domain
from moetta.data.images import contents, named
from moetta.data.preprocess import Preprocess, preprocess_for
from moetta.data.streams import Stream
from moetta.suggest import nearest

# What each stream is made of, in the order of concatenation; "c" is 15 domains, "extra" is 4.
STREAMS: dict[str, tuple[str, ...]] = {
    "classical": ("c",),
    "potpourri": ("c", "r", "sketch", "a"),
    "potpourri+": ("c", "r", "sketch", "a", "val"),
    "validation": ("extra",),
    "cifar10-c": ("cifar10-c",),
}
Root = str | Path
Making = Literal["auto", "files", "on the fly"]


def stream(
    name: str,
    roots: Root | Mapping[str, Root | Domain],
    *,
    model: nn.Module | str | None = None,
    preprocess: Any = "model",
    severity: int = 5,
    corruptions: Making = "auto",
    partial: bool = False,
    mask: bool = False,
    **options: Any,
) -> Stream:
    """A stream of the paper, by name.

    - "classical": the 15 corruptions of ImageNet-C at severity 5; 750,000 images.
    - "potpourri": classical, ImageNet-R, -Sketch and -A; 838,389 images.
    - "potpourri+": potpourri and the clean validation images; 888,389 images.
    - "validation": the 4 extra corruptions, on which the paper chose its hyper-parameters.
    - "cifar10-c": the 15 corruptions of the CIFAR-10 test images.

    All are mixed by default: one uniform permutation drawn from `seed` alone, in batches of 64, the
    last of which may be short.

    Args:
        name: Which one.
        roots: The folder that holds the data sets under their usual names (imagenet-val,
            imagenet-c, imagenet-r, imagenet-sketch, imagenet-a); or the folder of each, by the keys
            "val", "c", "r", "sketch", "a", "cifar10", where a `Domain` may stand for "val", "r",
            "sketch", "a" and "cifar10".
        model: The model that is to see it, or the name of a timm model; it decides on mean and std
            and, unless `preprocess` does, on size, crop and interpolation.
        preprocess: "model", "paper" or given; see `preprocess_for`.
        severity: Severity of the corruptions.
        corruptions: "files" reads ImageNet-C, "on the fly" makes it from the validation images,
            and "auto" reads it where there is a folder for it.
        partial: Accept data sets that lack images, and leave out those of ImageNet-R, -Sketch, -A
            and the clean validation images that are absent; a warning and the card name them.
        mask: Record that ImageNet-R and -A are scored among their 200 classes.
        **options: Further options of `Stream`: order, seed, batch_size, limit, workers, start,
            on_error, corruption_seed, frost_folder.

    Raises:
        FileNotFoundError: If a folder is not what it should be: says what was expected and found,
            what to download and where it goes.
        ValueError: If the name or an option is not known, or the preprocessing does not fit.
    """
    if name not in STREAMS:
        raise ValueError(f"unknown stream {name!r}; {nearest(name, STREAMS)}")
    for key in ("normalise", "size", "interpolation", "preprocessing"):
        if key in options:
            raise ValueError(f"{key} follows from the preprocessing; use preprocess= instead")
    pre = preprocess_for(model, preprocess)
    source = _Source(roots, pre, severity, corruptions, partial)
    absent = [part for part in STREAMS[name] if source.lacks(part)]
    if absent and not partial:
        raise FileNotFoundError(_needs(name, absent, roots))
    parts = [part for part in STREAMS[name] if part not in absent]
    domains = [domain for part in parts for domain in source.read(part)]
    left_out = [IMAGENET[part].title for part in absent]
    if absent:
        warnings.warn(f"{name} is made without {', '.join(left_out)}: not found", stacklevel=2)
    return Stream(
        domains, mask=mask, name=name, left_out=left_out, **stream_options(pre), **options
    )


def _needs(name: str, absent: Sequence[str], roots: Root | Mapping[str, Root | Domain]) -> str:
    wanted = "; ".join(f"{IMAGENET[key].folder} ({IMAGENET[key].get})" for key in absent)
    if isinstance(roots, Mapping):
        where, found = "under the keys " + ", ".join(map(repr, absent)), ", ".join(roots)
    else:
        where, found = f"in {roots}", contents(Path(roots))
    return (
        f"{name} needs more data sets: expected, {where}, {wanted}; found {found or 'nothing'}. "
        "partial=True (--partial) makes the stream of what is there, and its card says what was "
        "left out."
    )


def stream_options(preprocess: Preprocess) -> dict[str, Any]:
    """The options of `Stream` that follow from a preprocessing."""
    # Pillow knows more ways to resize than tensors do.
    known = preprocess.interpolation in ("nearest", "bilinear", "bicubic")
    return {
        "normalise": preprocess.normalise,
        "size": preprocess.size,
        "interpolation": preprocess.interpolation if known else "bicubic",
        "preprocessing": preprocess.card(),
    }


class _Source:
    """Reads each part of a stream, and the validation images only once."""

    def __init__(
        self,
        roots: Root | Mapping[str, Root | Domain],
        preprocess: Preprocess,
        severity: int,
        corruptions: Making,
        partial: bool,
    ) -> None:
        self.roots = roots
        self.preprocess = preprocess
        self.severity = severity
        self.corruptions = corruptions
        self.partial = partial
        self._val: Domain | None = None
        if corruptions not in ("auto", "files", "on the fly"):
            raise ValueError(
                f'corruptions must be "auto", "files" or "on the fly", got {corruptions!r}'
            )

    def read(self, part: str) -> list[Domain]:
        if part in ("c", "extra"):
            return self._imagenet_c(CLASSICAL if part == "c" else EXTRA)
        if part == "cifar10-c":
            root = self._root("cifar10")
            clean = root if isinstance(root, Domain) else cifar10(root, partial=self.partial)
            return corrupted(clean, CLASSICAL, self.severity)
        if part == "val":
            self._val = self._val or self._imagenet("val")
            return [self._val]
        return [self._imagenet(part)]

    def lacks(self, part: str) -> bool:
        """Whether a data set that a stream can do without is not there at all."""
        if part not in ("r", "sketch", "a", "val"):
            return False
        if isinstance(self.roots, Mapping):
            return part not in self.roots
        return not is_there(part, Path(self.roots))

    def _imagenet_c(self, names: tuple[str, ...]) -> list[Domain]:
        if self.corruptions == "files" or (self.corruptions == "auto" and self._has_files()):
            root = self._root("c")
            if isinstance(root, Domain):
                raise ValueError('"c" must be a folder; give the clean images as "val" instead')
            return imagenet_c(root, names, self.severity, partial=self.partial)
        given = isinstance(self._root("val"), Domain)  # in the frame that its maker wants
        frame = None if given else IMAGENET_C_FRAME
        return corrupted(self.read("val")[0], names, self.severity, frame=frame)

    def _has_files(self) -> bool:
        if isinstance(self.roots, Mapping):
            return "c" in self.roots
        return bool(named(Path(self.roots), IMAGENET_C_FOLDERS))

    def _imagenet(self, kind: Any) -> Domain:
        root = self._root(kind)
        if isinstance(root, Domain):
            return root
        return imagenet(kind, root, self.preprocess, partial=self.partial)

    def _root(self, key: str) -> Root | Domain:
        if not isinstance(self.roots, Mapping):
            return self.roots
        if key not in self.roots:
            raise ValueError(f"this stream needs a folder for {key!r}; got {', '.join(self.roots)}")
        return self.roots[key]
