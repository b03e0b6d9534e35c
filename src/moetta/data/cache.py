"""Images kept in the user's cache folder, so that they are made or decoded only once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.files import read_safetensors, write_atomically

LabelledImages = tuple[Tensor, Tensor]
"""Uint8 images [N, 3, H, W] and their labels [N]."""


def cache_folder() -> Path:
    """``$MOETTA_CACHE``, else ``moetta`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("MOETTA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "moetta"


def cached(key: str, make: Callable[[], LabelledImages], version: str = "") -> LabelledImages:
    """What ``make`` returns, read from the cache if it was made before.

    A damaged file, or one of another version, is made again and replaced. If the cache cannot be
    written, the images are made every time.

    Args:
        key: Where to keep them, as a relative path without an ending.
        make: Makes the images.
        version: Stored with them. Key and version together must change with everything that the
            images depend on.
    """
    path = cache_folder() / f"{key}.safetensors"
    try:
        stored, metadata = read_safetensors(path)
        if metadata.get("version", "") == version:
            return stored["images"], stored["labels"]
    except (OSError, ValueError, KeyError):
        pass  # not there, or damaged
    images, labels = make()
    tensors = {"images": images.contiguous(), "labels": labels}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_bytes(tensors, {"version": version}))
    except OSError as error:
        warnings.warn(f"the images could not be cached: {error}", stacklevel=3)
    return images, labels
