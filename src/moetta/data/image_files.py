"""Image files that are decoded when they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from moetta.data.domains import UnreadableImage

Transform = Callable[[Image.Image], Any]
INCOMPLETE = "INCOMPLETE"  # `moetta corrupt` leaves a file of this name in folders until it is done


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in files, each decoded, converted to RGB and transformed when it is needed.

    Attributes:
        root: The folder that the files are in.
        files: Their paths below it, as bytes in one array: a million path objects would be copied
            into every worker.
        transform: Turns an RGB image into the one to show: an image or a uint8 [3, H, W] tensor.
        size: Width and height that every file must have; by default any.
    """

    root: Path
    files: NDArray[np.bytes_]
    transform: Transform | None = None
    size: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.files)

    def path(self, i: int) -> Path:
        """The path of a file."""
        return self.root / os.fsdecode(self.files[i])

    def __getitem__(self, i: int, /) -> Tensor:
        image = read_rgb(self.path(i))
        if self.size is not None and image.size != self.size:
            # Not an unreadable file that a stream may skip: the data set is not what it should be.
            raise ValueError(
                f"{self.path(i)} has {image.width} x {image.height} pixels, "
                f"expected {self.size[0]} x {self.size[1]}"
            )
        shown = image if self.transform is None else self.transform(image)
        return shown if isinstance(shown, Tensor) else pil_to_tensor(shown)

    def in_memory(self) -> Tensor:
        """All images as one uint8 tensor [N, 3, H, W]; for data sets of small images."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return torch.stack(list(pool.map(self.__getitem__, range(len(self)))))

    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and times of change, and of the decoder's version.

        It changes whenever the decoded images may have changed; no file is opened.
        """
        total = hashlib.blake2b(PIL.__version__.encode(), digest_size=16)
        for name in self.files:
            stat = os.stat(self.root / os.fsdecode(name))
            total.update(name + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return total.hexdigest()


def read_rgb(path: Path) -> Image.Image:
    """A file's image as 8-bit RGB.

    Raises:
        UnreadableImage: If it cannot be decoded, or the range of its pixels cannot be known.
    """
    try:
        with Image.open(path) as opened:
            return _as_rgb(opened)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"cannot read image {path}: {error}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    # Pillow's own conversion cuts the values of these modes off at 255: white, or black for floats.
    if image.mode.startswith("I;16"):
        pixels = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((pixels + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind} of unknown range; convert it to 8 or 16 bits")
    return image.convert("RGB")


def list_images(
    folder: Path,
    classes: Mapping[str, int],
    transform: Transform | None = None,
    *,
    size: tuple[int, int] | None = None,
    allow_empty: bool = False,
) -> tuple[ImageFiles, Tensor]:
    """The images below `folder/<class>/` for each class, in sorted order, and their labels.

    Args:
        folder: The folder.
        classes: The label of each class folder.
        transform: See `ImageFiles`.
        size: See `ImageFiles`.
        allow_empty: Whether a class may have no images.

    Raises:
        FileNotFoundError: If a class has no images and must have some, naming it.
        ValueError: If the folder says that it is incomplete.
    """
    if (folder / INCOMPLETE).exists():
        raise ValueError(
            f"{folder} is incomplete: moetta corrupt was stopped there, or is still running. Run "
            f"it again to finish, or remove {folder / INCOMPLETE} to use the folder as it is."
        )
    found = make_dataset(
        str(folder), dict(classes), extensions=IMG_EXTENSIONS, allow_empty=allow_empty
    )
    files = np.array([os.fsencode(os.path.relpath(path, folder)) for path, _ in found])
    labels = torch.tensor([label for _, label in found], dtype=torch.long)
    return ImageFiles(folder, files, transform, size), labels


def subfolders(folder: Path) -> list[str]:
    """The names of the visible folders in a folder, sorted."""
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def named_subfolders(folder: Path, names: Iterable[str]) -> list[Path]:
    """The subfolders with these names, given in lower case and found in any case, in that order."""
    if not folder.is_dir():
        return []
    there = {name.lower(): folder / name for name in subfolders(folder)}
    return [there[name] for name in names if name in there]


def contents(folder: Path) -> str:
    """What is in a folder, in a few words, for error messages."""
    if not folder.exists():
        return "no such folder"
    if not folder.is_dir():
        return "a file, not a folder"
    folders = subfolders(folder)
    files = sorted(e.name for e in os.scandir(folder) if e.is_file())
    found = [
        f"{len(x)} {what} ({_few(x)})" for what, x in (("folders", folders), ("files", files)) if x
    ]
    return " and ".join(found) or "an empty folder"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
