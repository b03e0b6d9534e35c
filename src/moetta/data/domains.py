"""A domain: images with labels, and optionally a corruption applied on the fly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moetta.data.corruptions import check_name, corrupt


class UnreadableImage(OSError):
    """An image that cannot be decoded; the message names its file and says why."""


class Images(Protocol):
    """Any sequence of images that returns the i-th one as uint8 [3, H, W].

    A uint8 tensor [N, 3, H, W] is one. A sequence that reads files raises `UnreadableImage` for an
    image it cannot decode.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Tensor: ...


@runtime_checkable
class RowImages(Images, Protocol):
    """Images that are quicker to read several at a time."""

    def read_rows(self, rows: Tensor) -> Tensor:
        """The images at these positions, uint8 [n, 3, H, W]."""
        ...


@dataclass(frozen=True)
class Rows:
    """Some images of a larger collection, without copying it."""

    images: Images
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int, /) -> Tensor:
        return self.images[int(self.rows[i])]


@dataclass(frozen=True)
class Unread:
    """An image that was left out of its batch, and why."""

    domain: str
    index: int
    reason: str


@dataclass(frozen=True, eq=False)
class Domain:
    """Images of one kind, with their labels.

    Attributes:
        name: What results call this domain; unique within a stream.
        images: A uint8 tensor [N, 3, H, W], or any sequence of uint8 [3, H, W] tensors of one size.
        labels: The class of each image, int64 [N].
        corruption: The corruption applied on the fly, one of `moetta.data.corruptions.ALL`.
        severity: Its severity, 1 to 5.
        index: Each image's number in its base data set, which its random draws are keyed by, so
            that a subset of a data set shows the same images as the whole. By default 0 to N - 1.
        classes: The classes that occur, for masked scoring (see `logit_mask`).
        origin: Where the images come from, for the protocol card.
    """

    name: str
    images: Images
    labels: Tensor
    corruption: str | None = None
    severity: int = 5
    index: Tensor | None = None
    classes: Sequence[int] | None = None
    origin: str = "in memory"

    def __post_init__(self) -> None:
        labels = torch.as_tensor(self.labels)
        if labels.dtype.is_floating_point or labels.ndim != 1 or len(labels) != len(self.images):
            raise ValueError(
                f"domain {self.name!r}: labels must be integers [N], one for each of the "
                f"{len(self.images)} images, got {labels.dtype} {list(labels.shape)}"
            )
        if len(labels) == 0:
            raise ValueError(f"domain {self.name!r} has no images")
        if int(labels.min()) < 0:
            raise ValueError(f"domain {self.name!r}: labels must not be negative")
        if isinstance(self.images, Tensor):
            _check_images(self.images, self.name)
        if self.corruption is not None:
            check_name(self.corruption)
        if self.severity not in range(1, 6):
            raise ValueError(f"domain {self.name!r}: severity must be 1 to 5, got {self.severity}")
        index = torch.arange(len(labels)) if self.index is None else torch.as_tensor(self.index)
        if index.shape != labels.shape:
            raise ValueError(f"domain {self.name!r}: index must have one entry for each image")
        object.__setattr__(self, "labels", labels.long())
        object.__setattr__(self, "index", index.long())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def numbers(self) -> Tensor:
        """Each image's number in its base data set."""
        assert self.index is not None  # filled in at construction
        return self.index

    def take(self, rows: Tensor) -> Domain:
        """The domain restricted to some of its images, which keep their numbers."""
        held = self.images
        return replace(
            self,
            images=held[rows] if isinstance(held, Tensor) else Rows(held, rows),
            labels=self.labels[rows],
            index=self.numbers[rows],
        )

    def read(
        self, rows: Tensor, *, seed: int = 0, frost_folder: Path | None = None
    ) -> tuple[Tensor, Tensor, list[Unread]]:
        """Reads and corrupts some images.

        Args:
            rows: Which ones, as positions in this domain.
            seed: The seed of the corruptions.
            frost_folder: The folder of the original frost photographs; by default frost is
                procedural.

        Returns:
            The images, uint8 [n, 3, H, W]; which entries of `rows` they are; and those that could
            not be read.
        """
        kept, unread = torch.arange(len(rows)), []
        if isinstance(self.images, Tensor):
            images = self.images[rows]
        elif isinstance(self.images, RowImages):
            images = self.images.read_rows(rows)
        else:
            decoded: dict[int, Tensor] = {}
            for slot, row in enumerate(rows.tolist()):
                try:
                    decoded[slot] = self.images[row]
                except UnreadableImage as error:
                    unread.append(Unread(self.name, int(self.numbers[row]), str(error)))
            images = self._stack(list(decoded.values()))
            kept = torch.tensor(list(decoded), dtype=torch.long)
        if self.corruption is not None and len(kept):
            images = corrupt(
                images,
                self.corruption,
                self.severity,
                index=self.numbers[rows[kept]],
                seed=seed,
                frost_folder=frost_folder,
            )
        return images, kept, unread

    def _stack(self, images: list[Tensor]) -> Tensor:
        if not images:
            return torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        if not isinstance(images[0], Tensor):
            raise ValueError(
                f"domain {self.name!r}: images must be uint8 tensors [3, H, W], got "
                f"{type(images[0]).__name__}; torch.from_numpy turns an ndarray into a tensor"
            )
        sizes = sorted({tuple(image.shape) for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f"domain {self.name!r} mixes image sizes {sizes}; "
                "read it with a preprocessing that resizes and crops"
            )
        stacked = torch.stack(images)
        _check_images(stacked, self.name)
        return stacked


def _check_images(images: Tensor, name: str) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"domain {name!r}: images must be uint8 [3, H, W] each, "
            f"got {images.dtype} {list(images.shape[1:])}"
        )
