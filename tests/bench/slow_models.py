"""A model whose source images arrive one per second, as from a slow disk.

Where they are counted: in the file that SLOW_LOG names, or else the file slow_log in the working
folder. If there is neither, they are not slow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny_models import photo_model
from torch import Tensor, nn

from moetta.bench import protocol

_draw = protocol.draw_images


def _log() -> str | None:
    named = Path("slow_log")
    return os.environ.get("SLOW_LOG") or (named.read_text() if named.exists() else None)


def _slowly(*arguments: Any) -> Iterator[Tensor]:
    for images in _draw(*arguments):
        for image in images.split(1):
            if (name := _log()) is not None:
                with Path(name).open("a") as log:
                    log.write("read\n")
                time.sleep(1)
            yield image


if _log() is not None:
    protocol.draw_images = _slowly


def vit() -> nn.Module:
    return photo_model()
