"""Images kept in the user's cache folder, so that they are made or decoded only once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.files import write_atomically

LabelledImages = tuple[Tensor, Tensor]
"""Uint8 images [N, 3, H, W] and their labels [N]."""


def cache_folder() -> Path:
    """``$MOETTA_CACHE``, else ``moetta`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("MOETTA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "moetta"


def cached(key: str, make: Callable[[], LabelledImages]) -> LabelledImages:
    """What ``make`` returns, read from the cache if it was made before.

    A damaged file is made again. Where the cache cannot be written, the images are made every time.

    Args:
        key: Where to keep them, as a relative path without an ending. It must change with
            everything that the images depend on.
        make: Makes the images.
    """
    path = cache_folder() / f"{key}.safetensors"
    try:
        stored = load_file(path)
        return stored["images"], stored["labels"]
    except (OSError, SafetensorError, KeyError):
        images, labels = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_bytes({"images": images.contiguous(), "labels": labels}))
    except OSError as error:
        warnings.warn(f"the images could not be cached: {error}", stacklevel=3)
    return images, labels
