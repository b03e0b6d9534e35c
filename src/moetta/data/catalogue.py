"""The data sets and named streams: each described once, as plain data.

Everything that depends on which stream it is asks its `StreamSpec` here: what to read, what to
download, which clean images belong to it, which of the paper's streams it corresponds to. A new
data set is a new entry in this file, as long as it comes in one of the layouts known to
`moetta.data.datasets`; other folders of images need no entry (see `moetta.data.mixture`).

This module imports nothing heavy, so that results can be read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moetta.suggest import nearest

Split = Literal["train", "test"]


@dataclass(frozen=True)
class ImageNetSet:
    """A data set of the ImageNet family: one folder per class, decoded when needed.

    Attributes:
        title: What messages call it.
        folders: Names of its folder, in lower case, the usual one first.
        images: How many images it has.
        get: Where to get it, as an imperative sentence.
        class_folders: How its class folders are named: all synsets, the 200 of ImageNet-R or -A, or
            the class numbers.
        first_folder: The first of them, for hints.
    """

    title: str
    folders: tuple[str, ...]
    images: int
    get: str
    class_folders: Literal["1k", "r", "a", "numbers"] = "1k"
    first_folder: str = "n01440764"

    @property
    def folder(self) -> str:
        """The usual name of its folder."""
        return self.folders[0]

    @property
    def few_classes(self) -> bool:
        """Whether it has only some of the classes, so that masked scoring makes a difference."""
        return self.class_folders in ("r", "a")


@dataclass(frozen=True)
class SmallSet:
    """A data set of small images in two splits, read into memory at once.

    Attributes:
        title: What messages call it.
        classes: Its classes, in the order of their numbers.
        images: How many images each split has.
        side: Height and width of an image.
        torchvision: The class of `torchvision.datasets` that reads the official archive.
        archive: The folder that the official archive unpacks to.
        get: Where to get it, as an imperative sentence.
    """

    title: str
    classes: tuple[str, ...]
    images: Mapping[Split, int]
    side: int
    torchvision: str
    archive: str
    get: str


IMAGENET_SETS = {
    "val": ImageNetSet(
        "ImageNet validation",
        ("imagenet-val", "val", "imagenet_val", "ilsvrc2012_img_val"),
        50_000,
        "register at image-net.org, download ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz into one folder, and let "
        'torchvision.datasets.ImageNet(folder, split="val") sort the images into folders by synset',
    ),
    "r": ImageNetSet(
        "ImageNet-R",
        ("imagenet-r", "imagenet_r", "r"),
        30_000,
        "download imagenet-r.tar as github.com/hendrycks/imagenet-r says, and unpack it",
        "r",
        "n01443537",
    ),
    "sketch": ImageNetSet(
        "ImageNet-Sketch",
        ("imagenet-sketch", "sketch", "imagenet_sketch"),
        50_889,
        "download ImageNet-Sketch.zip as github.com/HaohanWang/ImageNet-Sketch says, and unpack it",
    ),
    "a": ImageNetSet(
        "ImageNet-A",
        ("imagenet-a", "imagenet_a", "a"),
        7_500,
        "download imagenet-a.tar as github.com/hendrycks/natural-adv-examples says, and unpack it",
        "a",
        "n01498041",
    ),
    "v2": ImageNetSet(
        "ImageNet-V2",
        ("imagenetv2-matched-frequency-format-val", "imagenet-v2", "imagenetv2", "v2"),
        10_000,
        "download imagenetv2-matched-frequency.tar.gz as github.com/modestyachts/ImageNetV2 says, "
        "and unpack it",
        "numbers",
        "0",
    ),
}
IMAGENET_C_FOLDERS = ("imagenet-c", "imagenet_c", "c")
IMAGENET_C_ARCHIVES = ("noise", "blur", "weather", "digital", "extra")

SMALL_SETS = {
    "cifar10": SmallSet(
        "CIFAR-10",
        (
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
        ),
        {"train": 50_000, "test": 10_000},
        32,
        "CIFAR10",
        "cifar-10-batches-py",
        "download cifar-10-python.tar.gz as www.cs.toronto.edu/~kriz/cifar.html says and unpack it",
    ),
}


@dataclass(frozen=True)
class CleanImages:
    """The clean images that come with a stream, for methods that look at some before they start.

    Attributes:
        data: The data set they are drawn from: a key of `IMAGENET_SETS` or `SMALL_SETS`, or
            "digits", which are composed.
        origin: What the card of a run calls them.
    """

    data: str
    origin: str


IMAGENET_CLEAN = CleanImages("val", "ImageNet validation images")
CIFAR10_CLEAN = CleanImages("cifar10", "CIFAR-10 training images")
DIGITS_CLEAN = CleanImages("digits", "embedded training digits")

Option = Literal[
    "mask", "severity", "frost_folder", "preprocess", "normalise", "size", "partial", "on_error"
]
_MADE_HERE: frozenset[Option] = frozenset(("severity",))
_READ_FROM_FILES: frozenset[Option] = frozenset(get_args(Option)) - frozenset(("mask",))


@dataclass(frozen=True)
class StreamSpec:
    """A named stream.

    Attributes:
        name: What users call it.
        parts: The parts it is made of, in the order of concatenation: "c" (the 15 corruptions),
            "extra" (the 4 others), a key of `IMAGENET_SETS`, or a key of `SMALL_SETS` with "-c"
            (its test images under the 15 corruptions); for an embedded stream, the kinds of domains
            of `moetta.data.embedded`.
        images: How many images it has when its data sets are complete.
        classes: How many classes.
        clean: The clean images that come with it.
        options: The options of `moetta.data.stream` that change something on it.
        counterpart: The stream of the paper whose figures it can be compared with.
        embedded: Whether it is composed here, without any data to download.
    """

    name: str
    parts: tuple[str, ...]
    images: int
    classes: int
    clean: CleanImages
    options: frozenset[Option]
    counterpart: str | None = None
    embedded: bool = False

    @property
    def card_name(self) -> str:
        """What the cards of runs call it."""
        return f"embedded-{self.name}" if self.embedded else self.name

    def to_download(self, folder: str | Path) -> list[str]:
        """What to download for it, and where under ``folder`` each data set goes.

        >>> stream_spec("cifar10-c", "data").to_download("data")[0].split(":")[0]
        'CIFAR-10'
        """
        if self.embedded:
            return []
        wanted = dict.fromkeys((*self.parts, self.clean.data))
        texts = dict.fromkeys(to_download(part, Path(folder)) for part in wanted)
        return list(texts)


def _imagenet(
    name: str, parts: tuple[str, ...], images: int, counterpart: str | None = None
) -> StreamSpec:
    options: frozenset[Option] = frozenset(get_args(Option))
    return StreamSpec(name, parts, images, 1000, IMAGENET_CLEAN, options, counterpart)


def _embedded(
    name: str, parts: tuple[str, ...], images: int, counterpart: str | None = None
) -> StreamSpec:
    return StreamSpec(
        name, parts, images, 100, DIGITS_CLEAN, _MADE_HERE, counterpart, embedded=True
    )


STREAMS = (
    _imagenet("classical", ("c",), 750_000, "classical"),
    _imagenet("potpourri", ("c", "r", "sketch", "a"), 838_389, "potpourri"),
    _imagenet("potpourri+", ("c", "r", "sketch", "a", "val"), 888_389, "potpourri+"),
    _imagenet("validation", ("extra",), 200_000),
    # Corruptions alone, as in the paper's classical stream.
    StreamSpec(
        "cifar10-c", ("cifar10-c",), 150_000, 10, CIFAR10_CLEAN, _READ_FROM_FILES, "classical"
    ),
    _embedded("classical", ("c",), 14_400, "classical"),
    _embedded("potpourri", ("c", "r", "sketch", "a"), 16_097, "potpourri"),
    _embedded("potpourri+", ("c", "r", "sketch", "a", "clean"), 17_057, "potpourri+"),
    _embedded("validation", ("extra",), 14_400),
)
"""Every named stream. An embedded one may share its name with one that reads files."""


def stream_names(*, embedded: bool) -> tuple[str, ...]:
    """The names of the embedded streams, or of those that read files.

    >>> stream_names(embedded=True)
    ('classical', 'potpourri', 'potpourri+', 'validation')
    """
    return tuple(spec.name for spec in STREAMS if spec.embedded == embedded)


def is_stream(name: str, data: str | Path | None) -> bool:
    """Whether there is a stream of this name, in a data folder or, without one, embedded."""
    return name in stream_names(embedded=data is None)


def stream_spec(name: str, data: str | Path | None = None) -> StreamSpec:
    """The description of a named stream.

    Args:
        name: Its name.
        data: The folder of the data sets; None means the embedded benchmark. Only whether there is
            one matters here; nothing is opened.

    Raises:
        ValueError: If there is no such stream.

    >>> stream_spec("potpourri+").images, stream_spec("potpourri+", "data").images
    (17057, 888389)
    """
    embedded = data is None
    for spec in STREAMS:
        if (spec.name, spec.embedded) == (name, embedded):
            return spec
    names = stream_names(embedded=embedded)
    if embedded and name in stream_names(embedded=False):
        raise ValueError(
            f"stream {name!r} needs --data, the folder of its data sets; without it there are the "
            f"embedded streams: {', '.join(names)}"
        )
    raise ValueError(f"no stream {name!r}; {nearest(name, names)}")


def spec_of_card(card_name: str) -> StreamSpec | None:
    """The stream that a run's card names; None if it is not a named stream.

    >>> spec_of_card("embedded-classical").counterpart, spec_of_card("pets")
    ('classical', None)
    """
    return next((spec for spec in STREAMS if spec.card_name == card_name), None)


def compared_streams(clean: str) -> tuple[str, ...]:
    """The streams with these clean images that have a counterpart in the paper.

    >>> compared_streams("val"), compared_streams("cifar10")
    (('classical', 'potpourri', 'potpourri+'), ('cifar10-c',))
    """
    return tuple(s.name for s in STREAMS if s.clean.data == clean and s.counterpart is not None)


def to_download(part: str, folder: Path) -> str:
    """What to download for a part of a stream, and where under ``folder`` it goes."""
    small = SMALL_SETS.get(part.removesuffix("-c"))
    if small is not None:
        return f"{small.title}: {small.get}, so that {folder / small.archive} exists"
    if part in ("c", "extra"):
        archives = "extra.tar" if part == "extra" else "noise, blur, weather and digital.tar"
        return (
            f"ImageNet-C: download {archives} as github.com/hendrycks/robustness says and unpack "
            f"into {folder / IMAGENET_C_FOLDERS[0]}; without them the corruptions are made on the "
            "fly from the validation images"
        )
    data = IMAGENET_SETS[part]
    return f"{data.title}: {data.get}, so that {folder / data.folder / data.first_folder} exists"
