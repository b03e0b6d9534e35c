"""Opens the streams of the catalogue by name, from the folders that a user has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from moetta.data import embedded
from moetta.data.catalogue import IMAGENET_SETS, SMALL_SETS, StreamSpec, stream_spec
from moetta.data.corruptions import CLASSICAL, EXTRA
from moetta.data.datasets import (
    IMAGENET_C_FRAME,
    corrupted,
    has_imagenet,
    has_imagenet_c,
    imagenet,
    imagenet_c,
    small_set,
)
from moetta.data.domains import Domain
from moetta.data.image_files import contents
from moetta.data.preprocess import Preprocess, check_preprocess, preprocess_for
from moetta.data.streams import Stream

Root = str | Path
CorruptionsFrom = Literal["auto", "files", "on the fly"]


def stream(
    name: str,
    roots: Root | Mapping[str, Root | Domain],
    *,
    model: nn.Module | str | None = None,
    preprocess: Any = "model",
    severity: int = 5,
    corruptions: CorruptionsFrom = "auto",
    partial: bool = False,
    mask: bool = False,
    **options: Any,
) -> Stream:
    """A named stream, read from a user's folders.

    - "classical": the 15 corruptions of ImageNet-C at severity 5; 750,000 images.
    - "potpourri": classical, ImageNet-R, -Sketch and -A; 838,389 images.
    - "potpourri+": potpourri and the clean validation images; 888,389 images.
    - "validation": the 4 extra corruptions, on which the paper chose its hyper-parameters.
    - the key of a set of small images with "-c": its test images under the 15 corruptions.

    All are mixed by default: one uniform permutation drawn from `seed` alone, in batches of 64, the
    last of which may be short.

    Args:
        name: Which one; `moetta.data.catalogue` describes them all.
        roots: The folder that holds the data sets under their usual names (imagenet-val,
            imagenet-c, imagenet-r, imagenet-sketch, imagenet-a); or the folder of each, by the keys
            "val", "c", "r", "sketch", "a", "cifar10". In place of a folder a `Domain` may be given
            for each of these but "c".
        model: The model that will see it, or the name of a timm model; it decides on mean and std
            and, unless `preprocess` does, on size, crop and interpolation.
        preprocess: "model", "paper" or a preprocessing; see `preprocess_for`.
        severity: Severity of the corruptions.
        corruptions: "files" reads ImageNet-C, "on the fly" makes it from the validation images,
            and "auto" reads it if there is a folder for it.
        partial: Accept data sets that lack images, and leave out those of ImageNet-R, -Sketch, -A
            and the clean validation images that are missing; a warning and the card name them.
        mask: Record that ImageNet-R and -A are scored among their 200 classes.
        **options: Further options of `Stream`: order, seed, batch_size, limit, length, workers,
            start, on_error, corruption_seed, frost_folder.

    Raises:
        FileNotFoundError: If a folder is not what it should be: says what was expected and found,
            what to download and where it goes.
        ValueError: If the name or an option is unknown, or the preprocessing does not fit.
    """
    spec = stream_spec(name, data="given")
    for key in ("normalise", "size", "interpolation", "preprocessing"):
        if key in options:
            raise ValueError(f"{key} follows from the preprocessing; use preprocess= instead")
    pre = preprocess_for(model, preprocess)
    reader = _PartReader(roots, pre, severity, corruptions, partial)
    missing = [part for part in spec.parts if reader.lacks(part)]
    if missing and not partial:
        raise FileNotFoundError(_needs(name, missing, roots))
    parts = [part for part in spec.parts if part not in missing]
    domains = [domain for part in parts for domain in reader.read(part)]
    left_out = [IMAGENET_SETS[part].title for part in missing]
    if missing:
        warnings.warn(f"{name} is made without {', '.join(left_out)}: not found", stacklevel=2)
    return Stream(
        domains, mask=mask, name=name, left_out=left_out, **stream_options(pre), **options
    )


def source_images(
    spec: StreamSpec,
    data: Root | None,
    count: int,
    preprocess: Preprocess | None,
    *,
    partial: bool = False,
) -> Tensor | Iterator[Tensor]:
    """Clean images of a stream, as its model takes them, the same ones every time.

    Args:
        spec: The stream.
        data: The folder of its data sets; an embedded stream needs none.
        count: How many; fewer if the data set is smaller.
        preprocess: What the model expects; an embedded stream ignores it.
        partial: Accept a data set that lacks images.

    Returns:
        All of them as one tensor, or batches that are read as they are needed.
    """
    if spec.embedded:
        return embedded.source_images(count)
    if data is None or preprocess is None:
        raise ValueError(f"the clean images of {spec.name!r} need a data folder and a preprocess")
    key = spec.clean.data
    if key in SMALL_SETS:
        clean = small_set(key, data, "train", partial=partial, in_memory=False)
    else:
        clean = imagenet(key, data, preprocess, partial=partial)
    return draw_images(clean, count, preprocess)


def draw_images(domain: Domain, count: int, preprocess: Preprocess) -> Iterator[Tensor]:
    """Some of a domain's images in batches, as the model takes them, the same ones every time."""
    drawn = Stream([domain], seed=0, limit=min(count, len(domain)), **stream_options(preprocess))
    return (batch.images for batch in drawn)


def check_suits_embedded(model: nn.Module) -> None:
    """Refuses a model that expects other images than the embedded benchmark's.

    Raises:
        ValueError: If its mean, std or input size differ.
    """
    side = embedded.SIZE
    try:
        check_preprocess(model, Preprocess(embedded.MEAN, embedded.STD, size=(side, side)))
    except ValueError as error:
        raise ValueError(
            f"this model was not made for the embedded benchmark ({side} x {side} pixels, mean "
            f"{embedded.MEAN[0]}, std {embedded.STD[0]}): use digits-vit, digits-convnext or "
            "digits-resnet there, or name the folder of the model's own data with --data"
        ) from error


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


def _needs(name: str, missing: Sequence[str], roots: Root | Mapping[str, Root | Domain]) -> str:
    sets = [IMAGENET_SETS[key] for key in missing]
    wanted = "; ".join(f"{described.folder} ({described.get})" for described in sets)
    if isinstance(roots, Mapping):
        where, found = "under the keys " + ", ".join(map(repr, missing)), ", ".join(roots)
    else:
        where, found = f"in {roots}", contents(Path(roots))
    return (
        f"{name} needs more data sets: expected, {where}, {wanted}; found {found or 'nothing'}. "
        "partial=True (--partial) makes the stream of what is there, and its card says what was "
        "left out."
    )


class _PartReader:
    """Reads the parts of a stream as domains, listing the validation images only once."""

    def __init__(
        self,
        roots: Root | Mapping[str, Root | Domain],
        preprocess: Preprocess,
        severity: int,
        corruptions: CorruptionsFrom,
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
        if part in IMAGENET_SETS:
            return [self._validation() if part == "val" else self._imagenet(part)]
        key = part.removesuffix("-c")
        root = self._root(key)
        clean = root if isinstance(root, Domain) else small_set(key, root, partial=self.partial)
        return corrupted(clean, CLASSICAL, self.severity)

    def lacks(self, part: str) -> bool:
        """Whether a data set that a stream can do without is missing altogether."""
        if part not in IMAGENET_SETS:
            return False
        if isinstance(self.roots, Mapping):
            return part not in self.roots
        return not has_imagenet(part, Path(self.roots))

    def _imagenet_c(self, names: tuple[str, ...]) -> list[Domain]:
        if self.corruptions == "files" or (self.corruptions == "auto" and self._has_files()):
            root = self._root("c")
            if isinstance(root, Domain):
                raise ValueError('"c" must be a folder; give the clean images as "val" instead')
            return imagenet_c(root, names, self.severity, partial=self.partial)
        given = isinstance(self._root("val"), Domain)  # already framed as its maker wants it
        frame = None if given else IMAGENET_C_FRAME
        return corrupted(self._validation(), names, self.severity, frame=frame)

    def _has_files(self) -> bool:
        if isinstance(self.roots, Mapping):
            return "c" in self.roots
        return has_imagenet_c(Path(self.roots))

    def _validation(self) -> Domain:
        self._val = self._val or self._imagenet("val")
        return self._val

    def _imagenet(self, kind: str) -> Domain:
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
