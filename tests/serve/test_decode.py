import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from moetta.serve.decode import open_image, pixels
from moetta.serve.refusal import Refusal
from serve.small_service import picture

MANY = 10**7


def decoded(data, prepare=lambda image: image):
    return pixels(open_image(data, MANY), prepare)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_formats_come_back_exactly(kind):
    data = picture(kind=kind, **({"lossless": True} if kind == "WEBP" else {}))
    expected = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    found = decoded(data)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)


def test_jpeg_is_decoded():
    assert decoded(picture(kind="JPEG")).shape == (3, 24, 24)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_other_colour_modes_become_rgb(mode):
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (200, 200, 200)).convert(mode).save(
        out, "JPEG" if mode == "CMYK" else "PNG"
    )
    found = decoded(out.getvalue())
    assert found.shape == (3, 4, 4)
    assert found.float().mean() > 190


def test_transparency_in_a_palette_is_ignored_without_a_warning(recwarn):
    image = Image.new("RGB", (4, 4), (200, 100, 50)).convert("P", palette=Image.Palette.ADAPTIVE)
    for transparency in (0, bytes(range(256))):
        out = io.BytesIO()
        image.save(out, "PNG", transparency=transparency)
        assert decoded(out.getvalue())[:, 0, 0].tolist() == [200, 100, 50]
    assert not recwarn.list


def test_sixteen_bits_keep_their_brightness():
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), 32_768, dtype=np.uint16)).save(out, "PNG")
    assert decoded(out.getvalue()).unique().tolist() == [128]


def test_a_photo_is_turned_upright():
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was held on its side
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    assert decoded(out.getvalue()).shape == (3, 8, 4)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    # 40,000 x 40,000 pixels in a few hundred bytes; Pillow alone would refuse or warn, we refuse.
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99))
    with pytest.raises(Refusal) as refused:
        open_image(bomb, MANY)
    assert refused.value.status == 413
    with pytest.raises(Refusal, match="24 x 24 pixels; at most 575") as refused:
        open_image(picture(), 575)
    assert refused.value.status == 413


def test_a_text_bomb_in_a_png_is_refused():
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    good = picture()
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"x" * 200_000_000, 1))
    with pytest.raises(Refusal) as refused:
        decoded(good[:33] + text + good[33:])
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 422),
        (b"hello", 415),
        (b"GIF89a" + b"\0" * 50, 415),
        (b"%PDF-1.7", 415),
        (picture()[:40], 422),
        (picture()[:-40], 422),
        (picture(kind="JPEG")[:200], 422),
        (picture(kind="WEBP")[:60], 422),
        (b"\x89PNG garbage", 422),
    ],
)
def test_what_is_no_image_is_refused(data, status):
    with pytest.raises(Refusal) as refused:
        decoded(data)
    assert refused.value.status == status


def status(data):
    try:
        return decoded(data).shape[0]
    except Refusal as refusal:
        return refusal.status


def test_flipped_bytes_never_escape_as_another_error():
    rng = np.random.default_rng(0)
    seen = set()
    for kind in ("PNG", "JPEG", "WEBP"):
        good = np.frombuffer(picture(kind=kind), dtype=np.uint8)
        for _ in range(150):
            bad = good.copy()
            bad[rng.integers(0, len(bad), 4)] = rng.integers(0, 256, 4)
            seen.add(status(bad.tobytes()))
    assert {3, 422} <= seen <= {3, 413, 415, 422}
