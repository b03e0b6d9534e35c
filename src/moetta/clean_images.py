"""Clean images that some methods look at once before they start, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.inputs import Inputs
from moetta.state import read_safetensors, write_atomically

if TYPE_CHECKING:
    from moetta.adapter import Adapter, Source

FORMAT = "moetta-source"


def batches(source: Any, size: int, limit: int | None = None) -> Iterator[Inputs]:
    """The source images as model inputs, ``limit`` of them at most.

    A tensor is cut into batches of ``size``; any other iterable gives its own batches: tensors,
    (images, labels) pairs (the labels are ignored) or dicts of keyword inputs.

    Raises:
        ValueError: there is nothing in it, or something that is no batch.
    """
    seen = 0
    for item in source.split(size) if isinstance(source, Tensor) else source:
        if isinstance(item, (tuple, list)) and item:
            item = item[0]
        if isinstance(item, dict):
            item = {k: v for k, v in item.items() if k not in ("labels", "label")}
        elif not isinstance(item, Tensor):
            item = getattr(item, "images", item)
        if not isinstance(item, (Tensor, dict)):
            raise ValueError(
                "source must give tensors, (images, labels) pairs or dicts of inputs, not "
                f"{type(item).__name__}"
            )
        batch = Inputs.checked(
            () if isinstance(item, dict) else (item,), item if isinstance(item, dict) else {}
        )
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


def obtain(adapter: Adapter, source: Source, compute: Callable[[Any], dict[str, Tensor]]) -> None:
    """Put what a method needs of the source images among its running values.

    It is computed, or read from the file that ``source`` names.
    """
    if isinstance(source, (str, PathLike)):
        tensors, metadata = read_safetensors(source)
        if metadata.get("format") != FORMAT or metadata.get("method") != adapter.method:
            raise ValueError(f"{source} was not made by {adapter.method}'s save_source()")
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
