"""A model whose source images arrive one per second, as from a slow disk, while SLOW_LOG is set."""

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


def _slowly(*arguments: Any) -> Iterator[Tensor]:
    for images in _draw(*arguments):
        for image in images.split(1):
            with Path(os.environ["SLOW_LOG"]).open("a") as log:
                log.write("read\n")
            time.sleep(1)
            yield image


if "SLOW_LOG" in os.environ:
    protocol.draw_images = _slowly


def vit() -> nn.Module:
    return photo_model()
