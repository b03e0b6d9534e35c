"""Generated pictures kept in the user's cache folder, under the fingerprint of what made them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.files import write_atomically

Pictures = tuple[Tensor, Tensor]
"""Uint8 images [N, 3, H, W] and their labels [N]."""


def folder() -> Path:
    """``$MOETTA_CACHE``, else ``moetta`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("MOETTA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "moetta"


@cache
def fingerprint() -> str:
    """A hash of the code and data that make the pictures: another version, another folder."""
    here = Path(__file__).parent
    files = [*here.glob("*.py"), *here.glob("*.json"), *(here.parent / "corruptions").glob("*.py")]
    total = hashlib.blake2b(digest_size=8)
    for file in sorted(files, key=lambda f: (f.parent.name, f.name)):
        total.update(file.read_bytes())
    return total.hexdigest()


def cached(name: str, make: Callable[[], Pictures]) -> Pictures:
    """What ``make`` gives, read from the cache if it was made before.

    A damaged file is made again; a folder that cannot be written costs the time, not the result.
    """
    path = folder() / f"embedded-{fingerprint()}" / f"{name}.safetensors"
    try:
        stored = load_file(path)
        return stored["images"], stored["labels"]
    except (OSError, SafetensorError, KeyError):
        images, labels = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_bytes({"images": images.contiguous(), "labels": labels}))
    except OSError as error:
        warnings.warn(f"the pictures could not be cached: {error}", stacklevel=3)
    return images, labels
