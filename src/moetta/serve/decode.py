"""From the bytes of one image to the pixels that the model takes, within bounds."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from moetta.serve.refusal import Refusal

FORMATS = ("JPEG", "PNG", "WEBP")
QUICK_PIXELS = 256 * 256
"""Images of at most this size are decoded faster than a thread is woken up."""

# All that Pillow raises on damaged files; none of it may end a request with a server error.
_DAMAGED: tuple[type[Exception], ...] = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    ArithmeticError,
    MemoryError,
    AttributeError,
    RuntimeError,
    AssertionError,
    Image.DecompressionBombError,
)


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """The image's header, checked; its pixels are not decoded yet.

    Raises:
        Refusal: 413 if it has too many pixels, 415 if it has another format, 422 if damaged.
    """
    if not data:
        raise Refusal(422, "the image is empty; send the bytes of a JPEG, PNG or WebP file")
    try:
        with warnings.catch_warnings():
            # Our bound is stricter than the one that Pillow warns about.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if _looks_right(data):
            raise Refusal(422, "the image is damaged; send it again, whole") from None
        raise Refusal(
            415, "this is not a JPEG, PNG or WebP image; convert it to one of these"
        ) from None
    except Image.DecompressionBombError:
        raise Refusal(413, f"the image has more than {max_pixels:,} pixels; shrink it") from None
    except _DAMAGED:
        raise Refusal(422, "the image is damaged; send it again, whole") from None
    if image.width * image.height > max_pixels:
        raise Refusal(
            413,
            f"the image has {image.width:,} x {image.height:,} pixels; at most {max_pixels:,} "
            "are accepted, so shrink it",
        )
    return image


def pixels(image: Image.Image, prepare: Callable[[Image.Image], Any]) -> Tensor:
    """Decode an opened image, turn it upright, and give it the model's size.

    Raises:
        Refusal: 422 if it is damaged or has pixels of unknown range.
    """
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        prepared = prepare(_as_rgb(image if upright is None else upright))
    except Refusal:
        raise
    except _DAMAGED:
        raise Refusal(422, "the image is damaged; send it again, whole") from None
    if not isinstance(prepared, Tensor):
        prepared = torch.from_numpy(np.array(prepared)).permute(2, 0, 1)
    return prepared.contiguous()


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion would cut these off at 255
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise Refusal(422, "the image's pixels have an unknown range; convert it to 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:  # else Pillow warns
        image = image.convert("RGBA")
    return image.convert("RGB")


def _looks_right(data: bytes) -> bool:
    return data.startswith((b"\xff\xd8\xff", b"\x89PNG")) or data[8:12] == b"WEBP"
