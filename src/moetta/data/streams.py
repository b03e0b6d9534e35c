"""Streams: batches of samples from several domains, in an order fixed by a seed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from moetta.data.corruptions.textures import check_folder
from moetta.data.domains import Domain, Unread, UnreadableImage
from moetta.data.orders import Order, describe_order, make_order, stratified

Normalisation = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of a stream.

    Attributes:
        images: Normalised images, float32 [B, 3, H, W].
        labels: Their classes, int64 [B].
        domains: Their domains as positions in `Stream.domain_names`, int64 [B].
        index: Their positions in the concatenation of the domains, int64 [B].
        number: The number of this batch in the stream, from 0.
        unread: Images that belong here but could not be read.
    """

    images: Tensor
    labels: Tensor
    domains: Tensor
    index: Tensor
    number: int
    unread: tuple[Unread, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on another device."""
        return replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            domains=self.domains.to(device),
            index=self.index.to(device),
        )


class Stream:
    """Several domains as one stream of batches.

    The order is drawn once, and depends only on the domains, the order, the limit or length, and
    the seed. The last batch may be short. Iterating twice gives the same batches twice.

    Args:
        domains: The domains, in the order in which they are concatenated.
        order: "mixed", "continual", "gradual", "label_shift" or "bursts", or an order with its
            options, such as `LabelShift(gamma=0.01)`.
        seed: Seeds the order and the choice made by `limit`.
        batch_size: Samples per batch, at least 1.
        limit: Draws a subset of at most this many samples in which domains and classes keep their
            proportions.
        length: The same with exactly this many samples; an error if the domains have fewer.
        normalise: Mean and standard deviation by channel that the model expects, for pixels in
            [0, 1].
        size: Height and width (or one number for both) that images are resized to after the
            corruption; by default they keep their size, which must be the same in all domains.
        interpolation: How they are resized: "bilinear" or "bicubic".
        workers: Processes that read ahead; with 0, the current process reads. The batches do not
            depend on it.
        start: The first batch to yield, to resume where a run stopped.
        on_error: "fail" raises at an image that cannot be read; "skip" leaves it out of its batch
            and lists it in `skipped`. The other samples stay in their batches either way.
        corruption_seed: Seeds the corruptions, which do not depend on `seed`.
        frost_folder: The folder of the original frost photographs; by default frost is procedural.
        mask: Whether predictions in a domain with few classes are scored among those classes only;
            see `moetta.data.logit_mask`. It is recorded here and applied where runs are scored.
        name: What the protocol card calls the stream.
        left_out: What belongs to the stream of that name but is missing, for the card.
        preprocessing: What the protocol card says about preprocessing.

    Attributes:
        permutation: Positions in the concatenation, in stream order.
        skipped: The images that could not be read so far.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        order: str | Order = "mixed",
        seed: int = 42,
        batch_size: int = 64,
        limit: int | None = None,
        length: int | None = None,
        normalise: Normalisation,
        size: int | tuple[int, int] | None = None,
        interpolation: str = "bilinear",
        workers: int = 0,
        start: int = 0,
        on_error: Literal["fail", "skip"] = "fail",
        corruption_seed: int = 0,
        frost_folder: str | Path | None = None,
        mask: bool = False,
        name: str = "custom",
        left_out: Sequence[str] = (),
        preprocessing: dict[str, Any] | None = None,
    ) -> None:
        _check(domains, on_error, batch_size=batch_size, workers=workers, start=start, seed=seed)
        if frost_folder is not None:
            check_folder(Path(frost_folder))
        self.domains = tuple(domains)
        self.domain_names = tuple(d.name for d in domains)
        self.order = make_order(order)
        self.seed, self.batch_size, self.limit, self.length = seed, batch_size, limit, length
        self.workers, self.start, self.on_error = workers, start, on_error
        self.mask, self.name, self.left_out = mask, name, tuple(left_out)
        self.skipped: list[Unread] = []

        lengths = torch.tensor([len(d) for d in domains])
        domain_of = torch.arange(len(domains)).repeat_interleave(lengths)
        labels = torch.cat([d.labels for d in domains])
        chosen = torch.arange(len(labels))
        if length is not None:
            _check_length(length, len(labels), limit, name)
        count = limit if length is None else length
        if count is not None:
            chosen = stratified(domain_of, labels, count, seed)
        drawn = self.order(domain_of[chosen], labels[chosen], seed)
        self.permutation = chosen[drawn]
        self._counts = torch.bincount(domain_of[chosen], minlength=len(domains)).tolist()
        self._batches = _Batches(
            domains=self.domains,
            offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
            labels=labels,
            permutation=self.permutation,
            batch_size=batch_size,
            mean=_channels(normalise[0]),
            std=_channels(normalise[1], positive=True),
            size=(size, size) if isinstance(size, int) else size,
            interpolation=InterpolationMode(interpolation),
            on_error=on_error,
            corruption_seed=corruption_seed,
            frost_folder=None if frost_folder is None else Path(frost_folder),
        )
        self._preprocessing = preprocessing or {}
        self._check_start(start)

    def starting_at(self, batch: int) -> Stream:
        """The same stream, read from this batch on.

        It shares the domains and the order with this one, so nothing is listed or drawn again.

        Args:
            batch: The number of the first batch to yield, from 0, as `Batch.number` counts them.

        Raises:
            ValueError: If the stream has fewer batches.
        """
        self._check_start(batch)
        resumed = copy(self)
        resumed.start, resumed.skipped = batch, []
        return resumed

    def part(self, rank: int, size: int) -> Stream:
        """The same stream, of which only one of ``size`` equal parts of each batch is read.

        The first parts of a batch are longer by one where it cannot be divided. A part without an
        image holds the first image of its batch instead.
        """
        reduced = copy(self)
        reduced._batches = replace(self._batches, part=(rank, size))
        return reduced

    def _check_start(self, batch: int) -> None:
        if not 0 <= batch <= self.batches:
            raise ValueError(f"start must be between 0 and {self.batches} batches, got {batch}")

    @property
    def samples(self) -> int:
        """Number of samples in the whole stream."""
        return len(self.permutation)

    @property
    def batches(self) -> int:
        """Number of batches in the whole stream, wherever it starts."""
        return len(self._batches)

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples of each domain."""
        return dict(zip(self.domain_names, self._counts, strict=True))

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self._batches,
            sampler=range(self.start, self.batches),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_is,
            # Workers are seeded from this one; the default would draw from the global generator.
            generator=torch.Generator(),
        )
        first: tuple[str, str] | None = None
        for batch in loader:
            for unread in batch.unread:
                if unread not in self.skipped:
                    self.skipped.append(unread)
                    warnings.warn(f"skipped: {unread.reason}", stacklevel=2)
            if not len(batch):  # none of its images could be read
                continue
            names = (self.domain_names[d] for d in batch.domains.unique().tolist())
            shown = ", ".join(names), _size(batch.images)
            first = first or shown
            _check_sizes([first, shown])
            yield batch

    def card(self) -> dict[str, Any]:
        """Everything about the stream that a result on it must state, as plain JSON data."""
        b = self._batches
        return {
            "stream": self.name,
            # Only where given: the hash of an older run's card must stay the same.
            **({"left_out": list(self.left_out)} if self.left_out else {}),
            **({} if self.length is None else {"length": self.length}),
            "domains": [
                {
                    "name": d.name,
                    "samples": n,
                    "available": len(d),
                    "corruption": d.corruption,
                    "severity": d.severity if d.corruption else None,
                    "origin": d.origin,
                }
                for d, n in zip(self.domains, self._counts, strict=True)
            ],
            "samples": self.samples,
            "order": describe_order(self.order),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "limit": self.limit,
            "preprocessing": {
                "mean": b.mean.flatten().tolist(),
                "std": b.std.flatten().tolist(),
                "size": list(b.size) if b.size else None,
                "interpolation": b.interpolation.value,
                **self._preprocessing,
            },
            "mask": self.mask,
            "corruption_seed": b.corruption_seed,
            "frost": "photographs" if b.frost_folder else "procedural",
            "on_error": self.on_error,
            "skipped": [asdict(unread) for unread in self.skipped],
        }


@dataclass(frozen=True, eq=False)
class _Batches(Dataset[Batch]):
    """Makes batch b from b alone, so that any worker can make any batch."""

    domains: tuple[Domain, ...]
    offsets: Tensor
    labels: Tensor
    permutation: Tensor
    batch_size: int
    mean: Tensor
    std: Tensor
    size: tuple[int, int] | None
    interpolation: InterpolationMode
    on_error: str
    corruption_seed: int
    frost_folder: Path | None
    part: tuple[int, int] = (0, 1)

    def __len__(self) -> int:
        return -(-len(self.permutation) // self.batch_size)

    def __getitem__(self, b: int) -> Batch:
        index = self.permutation[b * self.batch_size : (b + 1) * self.batch_size]
        rank, size = self.part
        own = index.tensor_split(size)[rank]
        index = own if len(own) else index[:1]
        domains = torch.searchsorted(self.offsets, index, right=True) - 1
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        unread: list[Unread] = []
        for d in domains.unique().tolist():
            slots = (domains == d).nonzero().squeeze(1)
            images, kept, lost = self.domains[d].read(
                index[slots] - self.offsets[d],
                seed=self.corruption_seed,
                frost_folder=self.frost_folder,
            )
            if lost and self.on_error == "fail":
                raise UnreadableImage(
                    f'{lost[0].reason} (on_error="skip" would leave such images out)'
                )
            unread += lost
            if len(kept):
                parts[d] = (slots[kept], self._fit(images))
        if not parts:
            none = index[:0]
            return Batch(torch.empty(0, 3, 0, 0), none, none, none, b, tuple(unread))
        slots = torch.cat([slots for slots, _ in parts.values()])
        images = self._normalised(parts, slots.argsort())
        slots = slots.sort().values
        index, domains = index[slots], domains[slots]
        return Batch(images, self.labels[index], domains, index, b, tuple(unread))

    def _fit(self, images: Tensor) -> Tensor:
        if self.size is None or tuple(images.shape[-2:]) == tuple(self.size):
            return images
        fitted: Tensor = resize(images, list(self.size), self.interpolation, antialias=True)
        return fitted

    def _normalised(self, parts: dict[int, tuple[Tensor, Tensor]], order: Tensor) -> Tensor:
        _check_sizes([(self.domains[d].name, _size(p)) for d, (_, p) in parts.items()])
        images = torch.cat([part for _, part in parts.values()])[order]
        return images.float().div_(255).sub_(self.mean).div_(self.std)


def _size(images: Tensor) -> str:
    return f"{images.shape[-1]} x {images.shape[-2]}"


def _check_length(length: int, available: int, limit: int | None, name: str) -> None:
    if limit is not None:
        raise ValueError("give a stream a length or a limit, not both")
    if not 1 <= length <= available:
        raise ValueError(
            f"length must be between 1 and the {available:,} images of {name!r}, got {length:,}; "
            "only the streams of the embedded benchmark can be made longer"
        )


def _check_sizes(shown: Sequence[tuple[str, str]]) -> None:
    if len({size for _, size in shown}) > 1:
        listed = "; ".join(f"{name}: {size}" for name, size in shown)
        raise ValueError(f"the domains differ in image size ({listed}); give the stream a size")


def _as_is(batch: Any) -> Any:
    return batch


def _channels(values: Sequence[float], positive: bool = False) -> Tensor:
    channels = torch.as_tensor(values, dtype=torch.float32).flatten()
    sound = len(channels) == 3 and bool(channels.isfinite().all())
    if not sound or (positive and bool((channels <= 0).any())):
        raise ValueError(
            "normalise must be a mean and a positive std of 3 numbers each (R, G, B, for pixels in "
            f"[0, 1]), got {values!r}"
        )
    return channels.view(1, 3, 1, 1)


def _check(domains: Sequence[Domain], on_error: str, **numbers: int) -> None:
    if not domains:
        raise ValueError("a stream needs at least one domain")
    names = [d.name for d in domains]
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"domain names must be unique; used twice: {', '.join(twice)}")
    for what, value in numbers.items():
        least = 1 if what == "batch_size" else 0
        if value < least:
            raise ValueError(f"{what} must be at least {least}, got {value}")
    if on_error not in ("fail", "skip"):
        raise ValueError(f'on_error must be "fail" or "skip", got {on_error!r}')
