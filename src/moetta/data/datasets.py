"""Data sets in their ordinary folder layouts, read as domains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms.v2 import CenterCrop, Compose, Resize

from moetta.data.corruptions import CLASSICAL
from moetta.data.domains import Domain, UnreadableImage
from moetta.data.images import ImageFiles, Transform, contents, list_images, named, subfolders
from moetta.data.labels import LabelMap, imagenet_synsets, label_map, label_scheme
from moetta.data.preprocess import Preprocess

# What ImageNet-C's authors did to the validation images before corrupting them.
IMAGENET_C_FRAME: Transform = Compose([Resize(256), CenterCrop(224)])


@dataclass(frozen=True)
class _Layout:
    """How a data set of the ImageNet family comes."""

    title: str
    folders: tuple[str, ...]
    images: int
    get: str
    classes: Callable[[], Sequence[str]] = imagenet_synsets
    few: bool = False

    @property
    def folder(self) -> str:
        return self.folders[0]


IMAGENET = {
    "val": _Layout(
        "ImageNet validation",
        ("imagenet-val", "val", "imagenet_val", "ilsvrc2012_img_val"),
        50_000,
        "Register at image-net.org, download ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz into one folder, and let "
        'torchvision.datasets.ImageNet(folder, split="val") sort the images into folders by synset',
    ),
    "r": _Layout(
        "ImageNet-R",
        ("imagenet-r", "imagenet_r", "r"),
        30_000,
        "Download imagenet-r.tar as github.com/hendrycks/imagenet-r says, and unpack it",
        lambda: imagenet_synsets("r"),
        few=True,
    ),
    "sketch": _Layout(
        "ImageNet-Sketch",
        ("imagenet-sketch", "sketch", "imagenet_sketch"),
        50_889,
        "Download ImageNet-Sketch.zip as github.com/HaohanWang/ImageNet-Sketch says, and unpack it",
    ),
    "a": _Layout(
        "ImageNet-A",
        ("imagenet-a", "imagenet_a", "a"),
        7_500,
        "Download imagenet-a.tar as github.com/hendrycks/natural-adv-examples says, and unpack it",
        lambda: imagenet_synsets("a"),
        few=True,
    ),
    "v2": _Layout(
        "ImageNet-V2",
        ("imagenetv2-matched-frequency-format-val", "imagenet-v2", "imagenetv2", "v2"),
        10_000,
        "Download imagenetv2-matched-frequency.tar.gz as github.com/modestyachts/ImageNetV2 says, "
        "and unpack it",
        lambda: [str(i) for i in range(1000)],
    ),
}
Kind = Literal["val", "r", "sketch", "a", "v2"]
IMAGENET_C_FOLDERS = ("imagenet-c", "imagenet_c", "c")
_C_GROUPS = ("noise", "blur", "weather", "digital", "extra")  # the archives ImageNet-C comes in


def imagenet(
    kind: Kind, folder: str | Path, preprocess: Preprocess, *, partial: bool = False
) -> Domain:
    """A data set of the ImageNet family, labelled among all 1000 classes.

    Args:
        kind: "val", "r", "sketch", "a" or "v2".
        folder: Its folder, or the folder that holds it under one of its usual names.
        preprocess: How its images are resized and cropped.
        partial: Accept a folder that lacks images or classes; it is an error otherwise.
    """
    if kind not in IMAGENET:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(IMAGENET)}")
    layout, folder = IMAGENET[kind], Path(folder)
    expected = layout.classes()
    candidates = [*named(folder, layout.folders), folder]
    home = next((c for c in candidates if _class_folders(c, expected)), None)
    if home is None:
        raise FileNotFoundError(_not_found(kind, candidates, expected))
    present = _class_folders(home, expected)
    strange = sorted(set(subfolders(home)) - set(expected))
    if strange or (len(present) < len(expected) and not partial):
        raise FileNotFoundError(
            f"{layout.title}: expected exactly its {len(expected)} class folders in {home}, found "
            f"{len(present)} of them and {len(strange)} others {strange[:3]}."
            + ("" if strange else " partial=True accepts a part of the data set.")
        )
    scheme = "numbers" if kind == "v2" else "imagenet"
    images, labels = list_images(
        home, label_map(scheme, present), preprocess.transform(), allow_empty=partial
    )
    if len(images) != layout.images and not partial:
        raise ValueError(
            f"{layout.title}: expected {layout.images:,} images in {home}, found {len(images):,}. "
            "partial=True accepts a part of the data set; results then say so."
        )
    classes = tuple(label_map("imagenet", expected).values()) if layout.few else None
    name = {"val": "imagenet"}.get(kind, f"imagenet-{kind}")
    origin = f"{layout.title}, {len(images):,} of {layout.images:,} images"
    return Domain(name, images, labels, classes=classes, origin=origin)


def is_there(kind: str, folder: Path) -> bool:
    """Whether a folder holds this data set among others, under one of its usual names.

    The validation images may also be the folder itself; other data sets have the same synsets.
    """
    layout = IMAGENET[kind]
    if kind == "val" and _class_folders(folder, layout.classes()):
        return True
    return bool(named(folder, layout.folders))


def corrupted(
    domain: Domain,
    names: Sequence[str] = CLASSICAL,
    severity: int = 5,
    *,
    frame: Transform | None = None,
) -> list[Domain]:
    """A domain under each of several corruptions, made on the fly.

    Args:
        domain: The clean pictures.
        names: The corruptions.
        severity: Their severity.
        frame: How image files are resized and cropped before they are corrupted, if not as the
            domain does it; `IMAGENET_C_FRAME` makes ImageNet-C out of the ImageNet validation
            images, except that the published files were compressed to JPEG once more.
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
    """ImageNet-C as published: `<corruption>/<severity>/<synset>/*.JPEG`, one domain for each name.

    The archives may be unpacked side by side or each in its folder (noise, blur, weather, digital,
    extra). The pictures are already cropped to 224 and are not cropped again; reading one of
    another size is an error.
    """
    root = Path(folder)
    inner = named(root, IMAGENET_C_FOLDERS)
    homes = [h for top in (*inner, root) for h in (top, *named(top, _C_GROUPS))]
    domains = []
    for name in names:
        found = [h / name / str(severity) for h in homes if (h / name / str(severity)).is_dir()]
        if not found:
            raise FileNotFoundError(
                f"ImageNet-C: expected {name}/{severity}/<synset>/*.JPEG in {homes[0]}, found "
                f"{contents(homes[0])}. Download the archives that hold it (noise, blur, weather, "
                "digital, extra) as github.com/hendrycks/robustness says, and unpack them there; "
                "or have the corruptions made on the fly from the validation images."
            )
        expected = imagenet_synsets()
        present = _class_folders(found[0], expected)
        complete = len(present) == len(expected) or (partial and present)
        if not complete:
            raise FileNotFoundError(
                f"ImageNet-C: expected {len(expected)} synset folders in {found[0]}, found "
                f"{contents(found[0])}"
            )
        images, labels = list_images(
            found[0], label_map("imagenet", present), size=(224, 224), allow_empty=partial
        )
        if len(images) != 50_000 and not partial:
            raise ValueError(
                f"ImageNet-C: expected 50,000 images in {found[0]}, found {len(images):,}. "
                "partial=True accepts a part of the data set; results then say so."
            )
        origin = f"ImageNet-C files, severity {severity}, {len(images):,} of 50,000 images"
        domains.append(Domain(name, images, labels, origin=origin))
    return domains


CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


CIFAR10_IMAGES = {"train": 50_000, "test": 10_000}


def cifar10(
    folder: str | Path,
    split: Literal["train", "test"] = "test",
    *,
    download: bool = False,
    partial: bool = False,
) -> Domain:
    """CIFAR-10, in memory, at its own 32 x 32.

    Args:
        folder: Holds `<split>/<class>/*.jpg` (or .png), or torchvision's `cifar-10-batches-py`. The
            latter is Python pickles, which torchvision reads, and only if they are, byte for byte,
            the official ones.
        split: "train" or "test".
        download: Let torchvision download the official archive into `folder`.
        partial: Accept a folder that lacks images; it is an error otherwise.
    """
    folder = Path(folder)
    tree = folder / split
    if tree.is_dir() and not download:
        if subfolders(tree) != list(CIFAR10_CLASSES):
            raise FileNotFoundError(
                f"CIFAR-10: expected the class folders {', '.join(CIFAR10_CLASSES)} in {tree}, "
                f"found {contents(tree)}"
            )
        images, labels = list_images(
            tree, label_map("sorted", CIFAR10_CLASSES), size=(32, 32), allow_empty=partial
        )
        origin, whole = f"CIFAR-10 {split}, image files", CIFAR10_IMAGES[split]
        if len(images) != whole:
            if not partial:
                raise ValueError(
                    f"CIFAR-10: expected {whole:,} images in {tree}, found {len(images):,}. "
                    "partial=True accepts a part of the data set; results then say so."
                )
            origin += f", {len(images):,} of {whole:,} images"
        try:
            return Domain("cifar10", images.in_memory(), labels, origin=origin)
        except UnreadableImage:  # whether that is fatal is for the stream to say
            return Domain("cifar10", images, labels, origin=origin)
    try:
        official = CIFAR10(folder, train=split == "train", download=download)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"CIFAR-10: expected {split}/<class>/*.jpg or torchvision's cifar-10-batches-py (with "
            f"the official checksums) in {folder}, found {contents(folder)}. "
            "download=True fetches it."
        ) from error
    pixels = torch.from_numpy(official.data).permute(0, 3, 1, 2).contiguous()
    targets = torch.tensor(official.targets)
    return Domain("cifar10", pixels, targets, origin=f"CIFAR-10 {split}, torchvision")


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
        preprocess: How its images are resized and cropped; a corruption comes after that.
        name: What results call the domain; the folder's name by default.
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


def to_download(part: str, root: Path) -> str:
    """What to download for a part of a stream, and where under ``root`` it goes."""
    if part == "cifar10-c":
        return (
            "CIFAR-10: download cifar-10-python.tar.gz as www.cs.toronto.edu/~kriz/cifar.html says "
            f"and unpack it, so that {root / 'cifar-10-batches-py'} exists"
        )
    if part in ("c", "extra"):
        archives = "extra.tar" if part == "extra" else "noise, blur, weather and digital.tar"
        return (
            f"ImageNet-C: download {archives} as github.com/hendrycks/robustness says and unpack "
            f"into {root / IMAGENET_C_FOLDERS[0]}; without them the corruptions are made on the "
            "fly from the validation images"
        )
    layout = IMAGENET[part]
    get = f"{layout.get[0].lower()}{layout.get[1:]}"
    return f"{layout.title}: {get}, so that {root / layout.folder / layout.classes()[0]} exists"


def _class_folders(folder: Path, expected: Collection[str]) -> list[str]:
    if not folder.is_dir():
        return []
    known = set(expected)
    return [name for name in subfolders(folder) if name in known]


def _not_found(kind: Kind, candidates: Sequence[Path], expected: Sequence[str]) -> str:
    layout, root = IMAGENET[kind], candidates[-1]
    where = candidates[0]
    said = (
        f"{layout.title}: expected {len(expected)} class folders ({expected[0]}, {expected[1]}, "
        f"...) in {root} or {root / layout.folder}, found {contents(where)} in {where}. "
    )
    if kind == "val" and where.is_dir() and any(where.glob("ILSVRC2012_val_*.JPEG")):
        said += (
            "The images lie flat, so their classes cannot be known: they must be sorted into one "
            "folder for each synset. "
        )
    return said + f"{layout.get}, so that {root / layout.folder / expected[0]} exists."
