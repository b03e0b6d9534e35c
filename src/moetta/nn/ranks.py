"""One batch spread over several processes (ranks): all that they exchange goes through here.

Each rank forwards its own rows. What depends on the whole batch is computed by every rank from
gathered rows, so that all of them come to the same result. The rule for gradients: below a gathered
value they are `Ranks.size` times too large, and `Ranks.mean` divides by that. A term that every
rank computes, such as a penalty on the parameters, is thus counted once, like everything else.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE = 512
"""Bytes of a control message; a longer one needs a second exchange."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer."""


class RanksDiffer(RuntimeError):
    """The ranks hold different values where they must hold the same ones."""


class Ranks:
    """The processes that share a batch.

    Attributes:
        rank: the number of this process among them.
        size: how many there are.
        sent: bytes that this process has handed over for exchange, by kind: "gradients", "rows"
            (logits, features and routing), "sums" (batch statistics) and "control" (messages).
        calls: how many exchanges that took.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        # gloo takes tensors on the CPU, nccl only those on a GPU.
        self._nccl = "nccl" in dist.get_backend(group)
        self._cpu = not self._nccl or "gloo" in dist.get_backend(group)

    def _carried(self, x: Tensor) -> Tensor:
        """The values on a device that the group can send from."""
        if x.is_cuda and self._nccl:
            return x
        return x.cpu() if self._cpu else x.cuda()

    def _do(self, operation: Callable[..., Any], kind: str, x: Tensor, *args: Any) -> None:
        self.sent[kind] += x.numel() * x.element_size()
        self.calls[kind] += 1
        try:
            operation(*args, group=self.group)
        except RuntimeError as error:
            *_, reason = ["", *str(error).strip().splitlines()]
            reason = re.sub(r"^\[[^]]*\] *", "", reason).partition(". ")[0]  # its source file
            raise RankLost(
                f"rank {self.rank} of {self.size} lost contact with another rank, which ended or "
                f"did not answer in time ({reason[:120] or type(error).__name__})"
            ) from error

    def exchange(self, x: Tensor, kind: str) -> list[Tensor]:
        """Every rank's tensor of the same shape and type, in the order of the ranks."""
        own = self._carried(x.detach()).contiguous()
        # As bytes: not every back end sends every type.
        flat = own.reshape(-1).view(torch.uint8)
        found = [torch.empty_like(flat) for _ in range(self.size)]
        self._do(dist.all_gather, kind, flat, found, flat)
        return [t.view(own.dtype).view(own.shape).to(x.device) for t in found]

    def summed(self, x: Tensor, kind: str) -> Tensor:
        """The sum over the ranks."""
        own = self._carried(x.detach().clone()).contiguous()
        self._do(dist.all_reduce, kind, own, own)
        return own.to(x.device)

    def tell(self, fact: Any) -> list[Any]:
        """What every rank has to say, as JSON data; all of them have to call this."""
        text = json.dumps(fact).encode()
        first = len(text).to_bytes(8, "little") + text
        found = self._texts(first[:MESSAGE], MESSAGE)
        sizes = [int.from_bytes(piece[:8], "little") for piece in found]
        rest = max(sizes) + 8 - MESSAGE
        if rest > 0:
            more = self._texts(first[MESSAGE:], rest)
            found = [a + b for a, b in zip(found, more, strict=True)]
        return [json.loads(t[8 : 8 + size]) for t, size in zip(found, sizes, strict=True)]

    def _texts(self, text: bytes, size: int) -> list[bytes]:
        padded = torch.frombuffer(bytearray(text.ljust(size, b" ")), dtype=torch.uint8)
        return [bytes(t.tolist()) for t in self.exchange(padded, "control")]

    def agree(self, error: Exception | None) -> None:
        """Raise if any rank has an error: its own one, or one that says which rank failed."""
        expected = isinstance(error, (ValueError, TypeError, OSError))
        told = self.tell(None if error is None else [expected, f"{error}", type(error).__name__])
        if error is not None:
            raise error
        for rank, found in enumerate(told):
            if found is not None:
                expected, text, name = found
                if expected:
                    raise ValueError(f"rank {rank}: {text}")
                raise RuntimeError(f"rank {rank} failed: {name}: {text}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within the block nothing is exchanged; an error in it on one rank is one on all."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            self.agree(error)
        else:
            self.agree(None)

    def any(self, value: bool) -> bool:
        """Whether it holds on any rank."""
        return any(self.tell(value))

    def broadcast(self, data: bytes | None) -> bytes:
        """The first rank's data; the others pass None."""
        (size, *_) = self.tell(None if data is None else len(data))
        whole = torch.zeros(size, dtype=torch.uint8)
        if data:
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.summed(whole, "control").cpu().numpy().tobytes() if size else b""

    def mean(self, tensors: Sequence[Tensor], loss: Tensor) -> tuple[list[Tensor], float]:
        """The mean of every tensor and of the loss over the ranks, in one exchange.

        Raises:
            RanksDiffer: the ranks do not mean the same loss.
        """
        wide = any(t.dtype == torch.float64 for t in tensors)
        dtype = torch.float64 if wide else torch.float32
        own = loss.detach()
        pieces = [t.detach().reshape(-1).to(dtype) for t in (*tensors, own, own.square())]
        flat = self.summed(torch.cat(pieces), "gradients") / self.size
        mean, square = flat[-2:].tolist()
        if math.sqrt(max(0.0, square - mean * mean)) > 2e-3 * max(1.0, abs(mean)):
            raise RanksDiffer(
                f"rank {self.rank} found the loss {float(own):.6g}, all ranks on average "
                f"{mean:.6g}: the method's objective must come from the whole batch "
                "(inputs.logits() and inputs.whole() give it), not from this rank's part"
            )
        split = flat[:-2].split([t.numel() for t in tensors])
        found = [s.view_as(t).to(t.dtype) for s, t in zip(split, tensors, strict=True)]
        return found, mean

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """Check that all ranks hold the same tensors, by their sums.

        Raises:
            RanksDiffer: they do not; names the first that differs.
        """
        names = sorted(tensors)
        told = self.tell([f"{name} {tuple(tensors[name].shape)}" for name in names])
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                odd = sorted(set(map(str, theirs)) ^ set(map(str, told[0])))
                raise RanksDiffer(f"the ranks have diverged: rank {rank} differs in {odd[0]}")
        if not names:
            return
        values = [tensors[name].detach().double() for name in names]
        sums = torch.stack([torch.stack((v.sum(), v.abs().sum())).cpu() for v in values])
        found = torch.stack(self.exchange(sums, "control"))
        # Ranks on unlike hardware round differently; what went apart is further apart than that.
        near = torch.isclose(found[:, :, 0], found[:1, :, 0], rtol=0, atol=1e-9, equal_nan=True)
        near |= (found[:, :, 0] - found[:1, :, 0]).abs() <= 1e-5 * found[:1, :, 1]
        if not near.all():
            rank, place = (~near).nonzero()[0].tolist()
            raise RanksDiffer(
                f"the ranks have diverged: {names[place]} differs between rank 0 and rank {rank}; "
                "load the last saved state on every rank"
            )


def even(total: int, size: int) -> tuple[int, ...]:
    """How many of ``total`` rows each of ``size`` ranks gets.

    >>> even(7, 3)
    (3, 2, 2)
    """
    least, more = divmod(total, size)
    return tuple(least + (rank < more) for rank in range(size))


@dataclass(frozen=True)
class Share:
    """How a batch is spread over the ranks.

    A rank without rows holds one row that counts for nothing: it takes part in every pass.

    Attributes:
        ranks: the ranks.
        counts: rows of each.
        order: positions in the batch of the gathered rows, if those are in another order.
    """

    ranks: Ranks
    counts: tuple[int, ...]
    order: Tensor | None = None

    @cached_property
    def total(self) -> int:
        """Rows of the whole batch."""
        return sum(self.counts)

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return self.counts[self.ranks.rank]

    @property
    def held(self) -> int:
        """Rows that this rank holds and forwards: at least one."""
        return max(1, self.count)

    @cached_property
    def start(self) -> int:
        """Where this rank's rows begin among the gathered ones."""
        return sum(self.counts[: self.ranks.rank])

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor over the whole batch."""
        if self.order is not None:
            whole = whole[self.order.to(whole.device)]
        return whole[self.start : self.start + self.count]

    def held_of(self, whole: Tensor) -> Tensor:
        """The same, with the row that counts for nothing where there is no other."""
        return self.mine(whole) if self.count else whole[:1]

    def real(self, rows: Tensor) -> Tensor:
        """Of the rows that a layer sees on this rank, those that count."""
        return rows[: self.count * (len(rows) // self.held)]

    def whole(self, rows: Tensor) -> Tensor:
        """The whole batch's rows, from every rank's; a layer may see a sample as several rows."""
        each = len(rows) // self.held
        if each * self.held != len(rows):
            raise ValueError(
                f"a layer got {len(rows)} rows for {self.held} samples: its first axis is not the "
                "batch, so its rows cannot be gathered from several ranks"
            )
        gathered: Tensor = _Gather.apply(rows.reshape(self.held, each, *rows.shape[1:]), self)
        if self.order is not None:
            gathered = gathered[self.order.argsort().to(gathered.device)]
        return gathered.flatten(0, 1)

    def wholes(self, several: Sequence[Tensor]) -> list[Tensor]:
        """`whole` of several tensors (floats, or small whole numbers) in one exchange."""
        if not several:
            return []
        with self.ranks.together():
            pieces = [t.reshape(self.held, -1) for t in several]
        widest = torch.float64 if any(t.dtype == torch.float64 for t in several) else torch.float32
        gathered = self.whole(torch.cat([p.to(widest) for p in pieces], 1))
        split = gathered.split([p.shape[1] for p in pieces], 1)
        pairs = zip(split, several, strict=True)
        return [found.reshape(-1, *t.shape[1:]).to(t.dtype) for found, t in pairs]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, with a gradient."""
        total: Tensor = _Sum.apply(x, self.ranks)
        return total

    def pick(self, index: Tensor) -> tuple[Tensor, Share]:
        """Which of its held rows this rank keeps if ``index`` is picked, and the new share.

        Args:
            index: a mask over the whole batch, or positions in it.
        """
        places = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
        stored = places.cpu()
        if self.order is not None:
            stored = self.order.cpu().argsort()[stored]
        ends = torch.tensor(self.counts).cumsum(0)
        owners = torch.searchsorted(ends, stored, right=True)
        counts = tuple(torch.bincount(owners, minlength=self.ranks.size).tolist())
        mixed = bool((owners[1:] < owners[:-1]).any())
        order = owners.argsort(stable=True) if mixed else None
        own = stored[owners == self.ranks.rank] - self.start
        kept = own if len(own) else torch.zeros(1, dtype=torch.long)
        return kept.to(index.device), Share(self.ranks, counts, order)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.held = share, len(rows)
        most = max(1, *share.counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: share.count] = rows[: share.count]
        found = share.ranks.exchange(padded, "rows")
        return torch.cat([t[:n] for t, n in zip(found, share.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        share: Share = ctx.share
        own = grad.new_zeros(ctx.held, *grad.shape[1:])
        own[: share.count] = grad[share.start : share.start + share.count] * share.ranks.size
        return own, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.summed(x, "sums")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.summed(grad, "sums"), None


# --- what layers ask ------------------------------------------------------------------------------

_now: Share | None = None
_differentiating = False


@contextlib.contextmanager
def forwarding(share: Share) -> Iterator[None]:
    """Within the block a forward pass belongs to this share of a batch."""
    global _now
    before, _now = _now, share
    try:
        yield
    finally:
        _now = before


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Within the block the gradient of a batch on several ranks is computed."""
    global _differentiating
    _differentiating = True
    try:
        yield
    finally:
        _differentiating = False


def current() -> Share | None:
    """The share that the current forward pass belongs to; None in a process by itself."""
    if _differentiating:
        raise ValueError(
            "gradient checkpointing repeats a layer that looks at the whole batch, which several "
            "ranks cannot do; turn checkpointing off"
        )
    return _now


def whole(rows: Tensor) -> Tensor:
    """The whole batch's rows of a layer, from this rank's."""
    share = current()
    return rows if share is None else share.whole(rows)


def held_of(rows: Tensor) -> Tensor:
    """The rows that this rank holds, of the whole batch's."""
    share = current()
    return rows if share is None else share.held_of(rows)


def draw(
    sample: Callable[..., Tensor], shape: Sequence[int], share: Share | None, **options: Any
) -> Tensor:
    """Random numbers for each row of a batch; a row gets the same ones, whatever rank holds it."""
    if share is None:
        return sample(tuple(shape), **options)
    each = shape[0] // share.held
    drawn = sample((share.total * each, *shape[1:]), **options)
    if each == 1:
        return share.held_of(drawn)
    split = drawn.reshape(share.total, each, *shape[1:])
    return share.held_of(split).flatten(0, 1)
