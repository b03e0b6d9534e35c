"""What a classifier is called with: positional or keyword tensors that share their first axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moetta.nn.ranks import Ranks, Share, even, forwarding


@dataclass(frozen=True)
class Inputs:
    """One batch: the arguments of one call of the model.

    On several ranks (``share``) the tensors are this rank's rows, and everything else is about the
    whole batch: its length, the masks and positions that `select` takes, the logits. An objective
    that is written with these is the whole batch's on every rank.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: Share | None = None

    @classmethod
    def checked(cls, args: tuple[Any, ...], kwargs: dict[str, Any], least: int = 1) -> Inputs:
        """The batch; unusable ones are refused before anything is computed."""
        batch = cls(args, kwargs)
        tensors = batch.tensors()
        if not tensors:
            raise ValueError(
                "the adapter was called without a tensor; pass the batch as the model takes it: "
                "adapter(images) or adapter(pixel_values=images)"
            )
        first = batch.main
        if first.dim() == 0 or first.shape[0] < least:
            raise ValueError(
                f"the batch is empty (shape {tuple(first.shape)}); skip empty batches before "
                "calling the adapter"
            )
        for tensor in tensors:
            if tensor.is_floating_point():
                _check_finite(tensor)
        if first.dim() == 4 and not first.is_floating_point():
            raise ValueError(
                f"the images are {first.dtype}; convert and normalise them first, for example "
                "(images.float() / 255 - mean) / std"
            )
        # Autograd cannot save tensors made in inference mode, but it can save copies of them.
        return batch.map(lambda t: t.clone() if t.is_inference() else t)

    @classmethod
    def agreed(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks, facts: dict[str, Any]
    ) -> tuple[Inputs, list[dict[str, Any]]]:
        """This rank's rows of a batch; a batch that one rank has to refuse is refused by all.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments.
            ranks: who shares the batch.
            facts: what else to tell the other ranks.

        Returns:
            The batch, and every rank's facts.
        """
        with ranks.together():
            batch = cls.checked(args, kwargs, least=0)
        kinds = [[str(t.dtype), *t.shape[1:]] for t in batch.tensors()]
        told = ranks.tell({"rows": batch.main.shape[0], "kinds": kinds, **facts})
        counts = tuple(fact["rows"] for fact in told)
        if not any(counts):
            raise ValueError("the batch is empty on every rank; skip empty batches")
        for rank, fact in enumerate(told):
            if fact["kinds"] != told[0]["kinds"]:
                raise ValueError(
                    f"the ranks have different inputs: rank 0 has {told[0]['kinds']}, rank {rank} "
                    f"has {fact['kinds']} (type and shape of a row)"
                )
        if not counts[ranks.rank]:
            batch = batch.map(_one_row)
        return cls(batch.args, batch.kwargs, Share(ranks, counts)), told

    def tensors(self) -> list[Tensor]:
        """All tensors, positional ones first."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]

    @property
    def main(self) -> Tensor:
        """The first tensor: the one whose first axis counts the samples."""
        return self.tensors()[0]

    @property
    def images(self) -> Tensor | None:
        """The first floating-point [B, C, H, W] tensor, or None for other kinds of input."""
        for tensor in self.tensors():
            if tensor.dim() == 4 and tensor.is_floating_point():
                return tensor
        return None

    def __len__(self) -> int:
        return self.main.shape[0] if self.share is None else self.share.total

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply ``f`` to every tensor."""

        def one(value: Any) -> Any:
            return f(value) if isinstance(value, Tensor) else value

        kwargs = {k: one(v) for k, v in self.kwargs.items()}
        return Inputs(tuple(map(one, self.args)), kwargs, self.share)

    def select(self, index: Tensor) -> Inputs:
        """The samples at ``index`` (positions or a mask) of every per-sample tensor."""
        size, share = self.main.shape[0], self.share
        if share is not None:
            index, share = share.pick(index)
        chosen = self.map(lambda t: t[index] if t.dim() and t.shape[0] == size else t)
        return chosen if share is None else Inputs(chosen.args, chosen.kwargs, share)

    def whole(self, rows: Tensor) -> Tensor:
        """What was computed from this rank's rows, for the whole batch."""
        return rows if self.share is None else self.share.whole(rows)

    def part(self, images: Tensor) -> Inputs:
        """Other images, which every rank holds: this rank's part of them."""
        if self.share is None:
            return Inputs((images,), {})
        share = Share(self.share.ranks, even(len(images), self.share.ranks.size))
        return Inputs((share.held_of(images),), {}, share)

    def with_images(self, images: Tensor) -> Inputs:
        """The same call with other pixels."""
        old = self.images
        return self.map(lambda t: images if t is old else t)

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model and take the logits out of what it returns."""
        if self.share is None:
            return self._logits(model)
        with self.share.ranks.together(), forwarding(self.share):
            own = self._logits(model)
        return self.share.whole(own)

    def _logits(self, model: nn.Module) -> Tensor:
        try:
            output = model(*self.args, **self.kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, TypeError, IndexError, ValueError) as error:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.tensors())
            raise ValueError(
                f"the model rejected a batch of shape {shapes}: {error}. {self._advice()}"
            ) from error
        logits = _find_logits(output)
        size = self.main.shape[0]
        if logits.dim() != 2 or logits.shape[0] != size or logits.shape[1] < 2:
            raise ValueError(
                f"the model returned logits of shape {tuple(logits.shape)} for {size} "
                "samples; a classifier returns [B, C] with at least two classes. "
                f"{self._advice()}"
            )
        return logits

    def _advice(self) -> str:
        """What is probably wrong with a batch that the model rejected."""
        if self.main.dim() == 3 and self.main.is_floating_point():
            return "If this is a single image, add the batch axis with images.unsqueeze(0)"
        return "Check channels, image size and argument names against what the model expects"


def _find_logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    inner = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(inner, Tensor):
        return inner
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ValueError(
        f"the model returned {type(output).__name__}; a classifier returns a tensor of logits, "
        "a tuple that starts with them, or an object with `.logits`"
    )


def _one_row(tensor: Tensor) -> Tensor:
    """A row that a rank without samples forwards; what comes out of it is dropped."""
    if not tensor.dim() or len(tensor):
        return tensor
    shape = (1, *tensor.shape[1:])
    if not tensor.is_floating_point():
        return tensor.new_ones(shape)
    # Not zeros: a model may divide by the deviation of an image.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(tensor)


def _check_finite(tensor: Tensor) -> None:
    # A finite sum proves every value finite in one cheap pass; otherwise look closer.
    if not torch.isfinite(tensor.detach().sum(dtype=torch.float32)):
        rows = tensor.detach().reshape(tensor.shape or (1,))
        bad = ~torch.isfinite(rows).reshape(len(rows), -1).all(1)
        if bad.any():
            raise ValueError(
                f"the batch has NaN or infinite values in samples "
                f"{bad.nonzero().flatten().tolist()[:8]}; drop or repair those samples before "
                "calling the adapter"
            )
