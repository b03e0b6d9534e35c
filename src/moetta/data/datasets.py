"""Reads data sets in their usual folder layouts as domains; `catalogue` says which there are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torchvision
from torchvision.transforms.v2 import CenterCrop, Compose, Resize

from moetta.data.cache import cached
from moetta.data.catalogue import (
    IMAGENET_C_ARCHIVES,
    IMAGENET_C_FOLDERS,
    IMAGENET_SETS,
    SMALL_SETS,
    ImageNetSet,
    Split,
)
from moetta.data.corruptions import CLASSICAL
from moetta.data.domains import Domain, Images, UnreadableImage
from moetta.data.image_files import (
    ImageFiles,
    Transform,
    contents,
    list_images,
    named_subfolders,
    subfolders,
)
from moetta.data.labels import LabelMap, imagenet_synsets, label_map, label_scheme
from moetta.data.preprocess import Preprocess

# What ImageNet-C's authors did to the validation images before corrupting them.
IMAGENET_C_FRAME: Transform = Compose([Resize(256), CenterCrop(224)])

CACHED_BYTES = 128 * 2**20
"""Decoded images are kept in the cache up to this size; larger data sets would fill the disk."""


def imagenet(
    kind: str, folder: str | Path, preprocess: Preprocess, *, partial: bool = False
) -> Domain:
    """A data set of the ImageNet family, labelled among all 1000 classes.

    Args:
        kind: "val", "r", "sketch", "a" or "v2".
        folder: Its folder, or the folder that holds it under one of its usual names.
        preprocess: How its images are resized and cropped.
        partial: Accept a folder that lacks images or classes; otherwise that is an error.
    """
    if kind not in IMAGENET_SETS:
        raise ValueError(f"no data set {kind!r}; valid: {', '.join(IMAGENET_SETS)}")
    described, folder = IMAGENET_SETS[kind], Path(folder)
    expected = _class_names(described)
    candidates = [*named_subfolders(folder, described.folders), folder]
    home = next((c for c in candidates if _class_folders(c, expected)), None)
    if home is None:
        raise FileNotFoundError(_not_found(kind, candidates, expected))
    present = _class_folders(home, expected)
    strange = sorted(set(subfolders(home)) - set(expected))
    if strange or (len(present) < len(expected) and not partial):
        raise FileNotFoundError(
            f"{described.title}: expected exactly its {len(expected)} class folders in {home}, "
            f"found {len(present)} of them and {len(strange)} others {strange[:3]}."
            + ("" if strange else " partial=True accepts a part of the data set.")
        )
    scheme = "numbers" if described.class_folders == "numbers" else "imagenet"
    images, labels = list_images(
        home, label_map(scheme, present), preprocess.transform(), allow_empty=partial
    )
    if len(images) != described.images and not partial:
        raise ValueError(_wrong_count(described.title, described.images, home, len(images)))
    classes = tuple(label_map("imagenet", expected).values()) if described.few_classes else None
    name = {"val": "imagenet"}.get(kind, f"imagenet-{kind}")
    origin = f"{described.title}, {len(images):,} of {described.images:,} images"
    return Domain(name, images, labels, classes=classes, origin=origin)


def has_imagenet(kind: str, folder: Path) -> bool:
    """Whether a folder holds this data set among others, under one of its usual names.

    The validation images may also be the folder itself; other data sets have the same synsets.
    """
    described = IMAGENET_SETS[kind]
    if kind == "val" and _class_folders(folder, _class_names(described)):
        return True
    return bool(named_subfolders(folder, described.folders))


def has_imagenet_c(folder: Path) -> bool:
    """Whether a folder holds the files of ImageNet-C, under one of their usual names."""
    return bool(named_subfolders(folder, IMAGENET_C_FOLDERS))


def corrupted(
    domain: Domain,
    names: Sequence[str] = CLASSICAL,
    severity: int = 5,
    *,
    frame: Transform | None = None,
) -> list[Domain]:
    """A domain under each of several corruptions, made on the fly.

    Args:
        domain: The clean images.
        names: The corruptions.
        severity: Their severity.
        frame: How image files are resized and cropped before they are corrupted, if not as the
            domain does it. `IMAGENET_C_FRAME` turns the ImageNet validation images into
            ImageNet-C, except that the published files were compressed to JPEG once more.
    """
    images = domain.images
    if frame is not None and isinstance(images, ImageFiles):
        images = replace(images, transform=frame)
    return [
        replace(
            domain,
            name=name,
            images=images,
            corruption=name,
            severity=severity,
            origin=f"made on the fly from {domain.origin}",
        )
        for name in names
    ]


def imagenet_c(
    folder: str | Path,
    names: Sequence[str] = CLASSICAL,
    severity: int = 5,
    *,
    partial: bool = False,
) -> list[Domain]:
    """ImageNet-C as published: `<corruption>/<severity>/<synset>/*.JPEG`, one domain per name.

    The archives may be unpacked side by side or each in its own folder (noise, blur, weather,
    digital, extra). The images were cropped to 224 pixels by their authors and are not cropped
    again; an image of another size is an error.
    """
    root = Path(folder)
    tops = (*named_subfolders(root, IMAGENET_C_FOLDERS), root)
    homes = [h for top in tops for h in (top, *named_subfolders(top, IMAGENET_C_ARCHIVES))]
    domains = []
    for name in names:
        found = [h / name / str(severity) for h in homes if (h / name / str(severity)).is_dir()]
        if not found:
            raise FileNotFoundError(
                f"ImageNet-C: expected {name}/{severity}/<synset>/*.JPEG in {homes[0]}, found "
                f"{contents(homes[0])}. Download the archives that hold it "
                f"({', '.join(IMAGENET_C_ARCHIVES)}) as github.com/hendrycks/robustness says, and "
                "unpack them there; or have the corruptions made on the fly from the validation "
                "images."
            )
        expected = imagenet_synsets()
        present = _class_folders(found[0], expected)
        if len(present) < len(expected) and not (partial and present):
            raise FileNotFoundError(
                f"ImageNet-C: expected {len(expected)} synset folders in {found[0]}, found "
                f"{contents(found[0])}"
            )
        images, labels = list_images(
            found[0], label_map("imagenet", present), size=(224, 224), allow_empty=partial
        )
        if len(images) != 50_000 and not partial:
            raise ValueError(_wrong_count("ImageNet-C", 50_000, found[0], len(images)))
        origin = f"ImageNet-C files, severity {severity}, {len(images):,} of 50,000 images"
        domains.append(Domain(name, images, labels, origin=origin))
    return domains


def cifar10(
    folder: str | Path,
    split: Split = "test",
    *,
    download: bool = False,
    partial: bool = False,
) -> Domain:
    """CIFAR-10, in memory, at its own 32 x 32 pixels; see `small_set`."""
    return small_set("cifar10", folder, split, download=download, partial=partial)


def small_set(
    key: str,
    folder: str | Path,
    split: Split = "test",
    *,
    download: bool = False,
    partial: bool = False,
    in_memory: bool = True,
) -> Domain:
    """A data set of small images, at their own size.

    Image files are decoded once: the test images are then kept in the user's cache folder (see
    `moetta.data.cache`) until a file is added, removed or changed, and are then replaced.

    Args:
        key: Which one, a key of `catalogue.SMALL_SETS` such as "cifar10".
        folder: Holds `<split>/<class>/*.jpg` (or .png), or the official archive unpacked. The
            latter is Python pickles, which torchvision reads, and only if they are, byte for byte,
            the official ones.
        split: "train" or "test".
        download: Let torchvision download the official archive into `folder`.
        partial: Accept a folder that lacks images; otherwise that is an error.
        in_memory: Decode all images now; otherwise each one when it is needed.
    """
    described, folder = SMALL_SETS[key], Path(folder)
    tree = folder / split
    if not tree.is_dir() or download:
        return _official(key, folder, split, download)
    if subfolders(tree) != sorted(described.classes):
        raise FileNotFoundError(
            f"{described.title}: expected the class folders {', '.join(described.classes)} in "
            f"{tree}, found {contents(tree)}"
        )
    numbers = {name: i for i, name in enumerate(described.classes)}
    side = described.side
    files, labels = list_images(tree, numbers, size=(side, side), allow_empty=partial)
    origin, whole = f"{described.title} {split}, image files", described.images[split]
    if len(files) != whole:
        if not partial:
            raise ValueError(_wrong_count(described.title, whole, tree, len(files)))
        origin += f", {len(files):,} of {whole:,} images"
    images: Images = files
    if in_memory:
        # Whether an unreadable image is fatal is for the stream to decide, when it comes to it.
        with suppress(UnreadableImage):
            images = _decoded(files, labels, f"{key}-{split}", 3 * side * side)
    return Domain(key, images, labels, origin=origin)


def _decoded(files: ImageFiles, labels: torch.Tensor, name: str, image_bytes: int) -> torch.Tensor:
    if len(files) * image_bytes > CACHED_BYTES:
        return files.in_memory()
    folder = hashlib.blake2b(os.fsencode(files.root.resolve()), digest_size=8).hexdigest()
    made = cached(
        f"decoded/{name}-{folder}",
        lambda: (files.in_memory(), labels),
        version=files.fingerprint(),
    )
    return made[0]


def _official(key: str, folder: Path, split: Split, download: bool) -> Domain:
    described = SMALL_SETS[key]
    read = getattr(torchvision.datasets, described.torchvision)
    try:
        official = read(folder, train=split == "train", download=download)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"{described.title}: expected {split}/<class>/*.jpg or torchvision's "
            f"{described.archive} (with the official checksums) in {folder}, found "
            f"{contents(folder)}. download=True fetches it."
        ) from error
    pixels = torch.from_numpy(official.data).permute(0, 3, 1, 2).contiguous()
    targets = torch.tensor(official.targets)
    return Domain(key, pixels, targets, origin=f"{described.title} {split}, torchvision")


def image_folder(
    folder: str | Path,
    preprocess: Preprocess,
    *,
    name: str | None = None,
    labels: LabelMap = "auto",
    base: Path | None = None,
    corruption: str | None = None,
    severity: int = 5,
) -> Domain:
    """Any folder of `<class>/*.jpg` (or another image format) as a domain.

    Args:
        folder: The folder.
        preprocess: How its images are resized and cropped, before any corruption.
        name: What results call the domain; by default the folder's name.
        labels: The class of each subfolder; see `moetta.data.labels.label_map`. By default synsets
            are ImageNet's classes, numbers are themselves, and other names are sorted.
        base: What a relative path of a label map file is relative to.
        corruption: A corruption made on the fly.
        severity: Its severity.
    """
    folder = Path(folder)
    classes = subfolders(folder) if folder.is_dir() else []
    if not classes:
        raise FileNotFoundError(
            f"expected one folder of images for each class in {folder}, found {contents(folder)}"
        )
    scheme = label_scheme(classes) if labels == "auto" else labels
    images, targets = list_images(
        folder, label_map(scheme, classes, base=base), preprocess.transform()
    )
    numbered = f", labels {scheme!r}" if scheme in ("imagenet", "numbers") else ""
    return Domain(
        name or folder.name,
        images,
        targets,
        corruption=corruption,
        severity=severity,
        origin=f"image folder {folder.name}{numbered}",
    )


def readers(folder: Path, preprocess: Preprocess) -> dict[str, Callable[[], list[Domain]]]:
    """A way to read each data set that a stream may be made of from a folder, whole or in part."""

    def imagenet_reader(kind: str) -> Callable[[], list[Domain]]:
        return lambda: [imagenet(kind, folder, preprocess, partial=True)]

    def small_reader(key: str) -> Callable[[], list[Domain]]:
        return lambda: [small_set(key, folder, partial=True, in_memory=False)]

    return {
        **{f"imagenet-{kind}": imagenet_reader(kind) for kind in IMAGENET_SETS},
        "imagenet-c": lambda: imagenet_c(folder, partial=True),
        **{key: small_reader(key) for key in SMALL_SETS},
    }


def _class_names(described: ImageNetSet) -> Sequence[str]:
    kind: Literal["1k", "r", "a", "numbers"] = described.class_folders
    return [str(i) for i in range(1000)] if kind == "numbers" else imagenet_synsets(kind)


def _class_folders(folder: Path, expected: Collection[str]) -> list[str]:
    if not folder.is_dir():
        return []
    known = set(expected)
    return [name for name in subfolders(folder) if name in known]


def _wrong_count(title: str, expected: int, folder: Path, found: int) -> str:
    return (
        f"{title}: expected {expected:,} images in {folder}, found {found:,}. partial=True "
        "accepts a part of the data set; the results then say so."
    )


def _not_found(kind: str, candidates: Sequence[Path], expected: Sequence[str]) -> str:
    described, root, where = IMAGENET_SETS[kind], candidates[-1], candidates[0]
    text = (
        f"{described.title}: expected {len(expected)} class folders ({expected[0]}, {expected[1]}, "
        f"...) in {root} or {root / described.folder}, found {contents(where)} in {where}. "
    )
    if kind == "val" and where.is_dir() and any(where.glob("ILSVRC2012_val_*.JPEG")):
        text += (
            "The images lie flat, so their classes cannot be known: they must be sorted into one "
            "folder for each synset. "
        )
    get = f"{described.get[0].upper()}{described.get[1:]}"
    return f"{text}{get}, so that {root / described.folder / expected[0]} exists."
