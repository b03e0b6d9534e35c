"""Source images, which some methods read once before they start, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.core.inputs import Inputs
from moetta.files import read_safetensors, write_atomically

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter, Source

FORMAT = "moetta-source"


def batches(
    source: Any, size: int, limit: int | None = None, seed: int | None = None
) -> Iterator[Inputs]:
    """The source images as model inputs, ``limit`` of them at most.

    A tensor, or a mapping of keyword inputs, is cut into batches of ``size``; any other iterable
    gives its own batches: tensors, (images, labels) pairs (the labels are ignored) or mappings.

    If a tensor is longer than ``limit``, a ``seed`` draws that many at random. Of an iterable,
    which may have no length, the first are taken: shuffle it if its order means something.

    Raises:
        ValueError: it is empty, or contains something that is not a batch.
    """
    if isinstance(source, Tensor) and seed is not None and limit and len(source) > limit:
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
        source = source[order[:limit].to(source.device)]
    seen = 0
    for batch in _pieces(source, size):
        if limit is not None and seen + len(batch) > limit:
            batch = batch.select(torch.arange(limit - seen, device=batch.main.device))
        seen += len(batch)
        yield batch
        if limit is not None and seen >= limit:
            return
    if seen == 0:
        raise ValueError(
            "source is empty; pass some clean images of the kind the model was trained on"
        )


def _pieces(source: Any, size: int) -> Iterator[Inputs]:
    if isinstance(source, Mapping):  # such as the output of a tokeniser or an image processor
        whole = _inputs(source)
        for index in torch.split(torch.arange(len(whole), device=whole.main.device), size):
            yield whole.select(index)
    else:
        for item in torch.split(source, size) if isinstance(source, Tensor) else source:
            yield _inputs(item)


def _inputs(item: Any) -> Inputs:
    """One batch, however it is packed."""
    if isinstance(item, (tuple, list)) and item:
        item = item[0]
    if not isinstance(item, (Tensor, Mapping)):
        item = getattr(item, "images", item)
    if isinstance(item, Tensor):
        return Inputs.checked((item,), {})
    if isinstance(item, Mapping):
        kept = {k: v for k, v in item.items() if k not in ("labels", "label")}
        return Inputs.checked((), kept)
    raise ValueError(
        "source must give tensors, (images, labels) pairs or dicts of inputs, not "
        f"{type(item).__name__}"
    )


def obtain(adapter: Adapter, source: Source, compute: Callable[[Any], dict[str, Tensor]]) -> None:
    """Compute what a method needs from source images, and keep it in its running values.

    If ``source`` is a path, it is read from that file instead.
    """
    if isinstance(source, (str, PathLike)):
        tensors, metadata = read_safetensors(source)
        if metadata.get("format") != FORMAT or metadata.get("method") != adapter.method:
            raise ValueError(f"{source} was not written by {adapter.method}'s save_source()")
        if metadata.get("model") != adapter.fingerprint():
            raise ValueError(f"{source} was computed for a model with other source weights")
    else:
        with torch.enable_grad():
            tensors = compute(source)
    adapter.from_source = list(tensors)
    adapter.running.update({name: t.to(adapter.device) for name, t in tensors.items()})


def save(adapter: Adapter, path: str | PathLike[str]) -> None:
    """Write what `obtain` computed."""
    metadata = {"format": FORMAT, "method": adapter.method, "model": adapter.fingerprint()}
    kept = {name: adapter.running[name] for name in adapter.from_source}
    data = {name: t.detach().cpu().contiguous() for name, t in kept.items() if t is not None}
    write_atomically(path, to_bytes(data, metadata))
