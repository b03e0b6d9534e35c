"""Data: domains, the orders in which they arrive, and the streams of the paper.

Names are imported when they are first used: the catalogue of streams can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetta.data.catalogue import StreamSpec, is_stream, stream_names, stream_spec
    from moetta.data.datasets import (
        cifar10,
        corrupted,
        image_folder,
        imagenet,
        imagenet_c,
        small_set,
    )
    from moetta.data.domains import Domain, Images, Unread, UnreadableImage
    from moetta.data.image_files import ImageFiles
    from moetta.data.labels import imagenet_synsets, label_map, logit_mask
    from moetta.data.mixtures import Mixture, mixture, read_mixture
    from moetta.data.named_streams import draw_images, source_images, stream, stream_options
    from moetta.data.orders import Bursts, Continual, Gradual, LabelShift, Mixed, Order, make_order
    from moetta.data.preprocess import Preprocess, check_preprocess, preprocess_for
    from moetta.data.streams import Batch, Stream

# The modules that hold the names below; the first ones are quick to import.
_MODULES = (
    "catalogue",
    "domains",
    "orders",
    "streams",
    "preprocess",
    "image_files",
    "labels",
    "datasets",
    "mixtures",
    "named_streams",
)

__all__ = [
    "Batch",
    "Bursts",
    "Continual",
    "Domain",
    "Gradual",
    "ImageFiles",
    "Images",
    "LabelShift",
    "Mixed",
    "Mixture",
    "Order",
    "Preprocess",
    "Stream",
    "StreamSpec",
    "Unread",
    "UnreadableImage",
    "check_preprocess",
    "cifar10",
    "corrupted",
    "draw_images",
    "image_folder",
    "imagenet",
    "imagenet_c",
    "imagenet_synsets",
    "is_stream",
    "label_map",
    "logit_mask",
    "make_order",
    "mixture",
    "preprocess_for",
    "read_mixture",
    "small_set",
    "source_images",
    "stream",
    "stream_names",
    "stream_options",
    "stream_spec",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"moetta.data.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
