"""The order in which a stream shows its samples: a permutation drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from moetta.suggest import nearest


class Order(Protocol):
    """A rule that turns the domain and label of each sample into a permutation of the samples."""

    name: ClassVar[str]

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation.

        Args:
            domains: The domain of each sample, int64 [N].
            labels: The class of each sample, int64 [N].
            seed: Seeds the draw.

        Returns:
            A permutation of 0 to N - 1.
        """
        ...


@dataclass(frozen=True)
class Mixed:
    """The paper's order: one uniform permutation of everything."""

    name: ClassVar[str] = "mixed"

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation."""
        return torch.randperm(len(domains), generator=generator(seed))


@dataclass(frozen=True)
class Continual:
    """One domain after another, in the order listed, each of them shuffled."""

    name: ClassVar[str] = "continual"

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation."""
        mixed = Mixed()(domains, labels, seed)
        return mixed[domains[mixed].argsort(stable=True)]


@dataclass(frozen=True)
class Gradual:
    """One domain after another, each fading linearly into the next.

    Each domain lasts one unit of time, blurred at both ends by `overlap`: with 1 the stream is
    always fading from one domain to the next, with 0 it is `continual`.
    """

    overlap: float = 1.0
    name: ClassVar[str] = "gradual"

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be between 0 and 1, got {self.overlap}")

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation."""
        draw = generator(seed)
        n = len(domains)
        _, turn = domains.unique(return_inverse=True)
        # A box convolved with a box is a trapezoid, and neighbouring trapezoids add up to one:
        # while one domain fades out, the next fades in by exactly as much.
        time = turn + torch.rand(n, generator=draw, dtype=torch.float64)
        time += (torch.rand(n, generator=draw, dtype=torch.float64) - 0.5) * self.overlap
        end = float(turn.max()) + 1
        time = time.abs()  # times before the start or after the end are folded back
        time = torch.where(time > end, 2 * end - time, time)
        return time.argsort(stable=True)


@dataclass(frozen=True)
class LabelShift:
    """Domains mixed, classes in waves: each class is spread over time slots by a Dirichlet draw.

    Attributes:
        gamma: Concentration: small values put a class into few slots, large ones give `mixed`.
        slots: Number of time slots; 0 means as many as there are classes.
    """

    gamma: float = 0.1
    slots: int = 0
    name: ClassVar[str] = "label_shift"

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma must be above 0, got {self.gamma}")
        if self.slots < 0:
            raise ValueError(f"slots must be at least 0, got {self.slots}")

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation."""
        mixed = Mixed()(domains, labels, seed)
        _, kind = labels[mixed].unique(return_inverse=True)
        classes = int(kind.max()) + 1
        slots = self.slots or classes
        rng = np.random.default_rng(seed)
        slot = torch.empty(len(mixed), dtype=torch.long)
        for c in range(classes):
            members = (kind == c).nonzero().squeeze(1)
            ends = rng.dirichlet(np.full(slots, self.gamma)).cumsum() * len(members)
            # Sample r of the class goes into the slot whose cumulative share covers r + 1/2.
            slot[members] = torch.from_numpy(
                np.searchsorted(ends, np.arange(len(members)) + 0.5).clip(max=slots - 1)
            )
        return mixed[slot.argsort(stable=True)]


@dataclass(frozen=True)
class Bursts:
    """Mixed, with sudden runs of a single domain.

    Attributes:
        length: Samples per run.
        share: The share of the stream that arrives in runs.
    """

    length: int = 256
    share: float = 0.5
    name: ClassVar[str] = "bursts"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")

    def __call__(self, domains: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Draws the permutation."""
        draw = generator(seed)
        mixed = torch.randperm(len(domains), generator=draw)
        pools = [mixed[domains[mixed] == d] for d in domains.unique()]
        runs: list[Tensor] = []
        wanted = int(self.share * len(domains))
        while wanted >= 1:
            length = min(self.length, wanted)
            able = [d for d, pool in enumerate(pools) if len(pool) >= length]
            if not able:  # only short remainders are left; they stay mixed
                break
            d = able[int(torch.randint(len(able), (), generator=draw))]
            runs.append(pools[d][:length])
            pools[d] = pools[d][length:]
            wanted -= length
        # Each run counts as one item among the remaining samples, and the items are shuffled.
        sizes = torch.tensor([len(run) for run in runs] + [1] * sum(map(len, pools)))
        place = torch.randperm(len(sizes), generator=draw).repeat_interleave(sizes)
        return torch.cat([*runs, *pools])[place.argsort(stable=True)]


ORDERS: dict[str, type[Any]] = {
    kind.name: kind for kind in (Mixed, Continual, Gradual, LabelShift, Bursts)
}


def make_order(order: str | Order, **options: Any) -> Order:
    """The order with this name and these options; an order object is returned as it is."""
    if not isinstance(order, str):
        return order
    if order not in ORDERS:
        raise ValueError(f"no order {order!r}; {nearest(order, ORDERS)}")
    try:
        made: Order = ORDERS[order](**options)
    except TypeError as error:
        known = ", ".join(ORDERS[order].__dataclass_fields__) or "none"
        raise ValueError(
            f"order {order!r} takes these options: {known}; got {', '.join(options)}"
        ) from error
    return made


def describe_order(order: Order) -> dict[str, Any]:
    """The name and options of an order, for the protocol card."""
    return {"name": order.name, **asdict(order)}  # type: ignore[call-overload]


def stratified(domains: Tensor, labels: Tensor, limit: int, seed: int) -> Tensor:
    """Draws `limit` samples in which every domain, and every class in it, keeps its proportion.

    Systematic sampling: the samples are lined up by domain and class, each class shuffled, and
    every (N / limit)-th is taken from a random start. Each domain, and each class in it, then
    contributes its exact proportion, rounded up or down.

    Args:
        domains: The domain of each sample, int64 [N].
        labels: The class of each sample, int64 [N].
        limit: How many to draw, at most N.
        seed: Seeds the draw.

    Returns:
        The positions drawn, ascending, int64 [limit].
    """
    n = len(domains)
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if limit >= n:
        return torch.arange(n)
    draw = generator(seed)
    row = torch.randperm(n, generator=draw)
    # Classes come in a random order, or a small limit would always pick the same ones.
    rank = torch.randperm(int(labels.max()) + 1, generator=draw)
    row = row[rank[labels[row]].argsort(stable=True)]
    row = row[domains[row].argsort(stable=True)]
    start = torch.rand((), generator=draw, dtype=torch.float64)
    at = ((torch.arange(limit, dtype=torch.float64) + start) * (n / limit)).long().clamp_(max=n - 1)
    return row[at].sort().values


def generator(seed: int) -> torch.Generator:
    """A new generator with this seed."""
    return torch.Generator().manual_seed(seed)


def apportion(shares: Sequence[float], whole: int) -> list[int]:
    """Whole numbers in these proportions (which sum to 1) that sum to ``whole``.

    >>> apportion([1 / 3, 1 / 3, 1 / 3], 10)
    [4, 3, 3]
    """
    parts = [int(share * whole + 1e-9) for share in shares]
    rest = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * whole)
    for i in rest[: whole - sum(parts)]:
        parts[i] += 1
    return parts
