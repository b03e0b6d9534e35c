"""From a request's body to the bytes of its images: raw, multipart or JSON, within bounds.

Bodies stay in memory and are never written to disk, which is why Starlette's own form parser, which
spools large files, is not used.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from moetta.serve.refusal import ClientLeft, Refusal
from moetta.serve.settings import Settings

RAW_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
Part = bytes | Refusal
"""The bytes of one image, or why this one of several cannot be read."""


class Buffers:
    """Counts the bytes of all bodies in memory, so that slow uploads cannot fill it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[_Hold]:
        """A body's share; given back at the end of the block."""
        hold = _Hold(self)
        try:
            yield hold
        finally:
            self.held -= hold.bytes


class _Hold:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.bytes = 0

    def add(self, count: int) -> None:
        if self._buffers.held + count > self._buffers.limit:
            raise Refusal(503, "too many uploads at the same time; try again", retry_after=1)
        self._buffers.held += count
        self.bytes += count


async def read_body(request: Request, settings: Settings, hold: _Hold) -> bytes:
    """All of a body, unless it is too large or too slow.

    Raises:
        Refusal: 408 if the client is too slow, 413 if the body is too large.
        ClientLeft: the client closed the connection.
    """
    too_large = Refusal(413, f"the body is too large; at most {settings.max_body:,} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > settings.max_body:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > settings.max_body:
                    raise too_large
                hold.add(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {settings.body_timeout:g} s") from None
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(chunks)


def split(body: bytes, content_type: str, max_images: int) -> list[Part]:
    """The images of a body.

    Raises:
        Refusal: 413 if there are too many, 415 if the type is not known, 422 if nothing can be
            read. One bad image of several is returned in its place instead.
    """
    kind, options = parse_options_header(content_type)
    name = kind.decode("latin-1").lower()
    if name in RAW_TYPES:
        return [body]
    if name == "multipart/form-data":
        return _multipart(body, options.get(b"boundary"), max_images)
    if name == "application/json":
        return _json(body, max_images)
    problem = (
        f"content type {name[:80]!r} is not accepted" if name else "the content type is missing"
    )
    raise Refusal(
        415,
        f"{problem}; send image/jpeg, image/png or image/webp (the file itself), "
        "multipart/form-data, or application/json (a list of base64 strings)",
    )


def _too_many(max_images: int) -> Refusal:
    return Refusal(413, f"too many images in one request; at most {max_images}")


def _json(body: bytes, max_images: int) -> list[Part]:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(422, "the body is not valid JSON") from None
    if not isinstance(found, list) or not found:
        raise Refusal(422, "the JSON body must be a list of base64 strings, at least one")
    if len(found) > max_images:
        raise _too_many(max_images)
    return [_base64(item) for item in found]


def _base64(item: Any) -> Part:
    if not isinstance(item, str):
        return Refusal(422, "this is not a string; send each image as a base64 string")
    try:
        return base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError):
        return Refusal(422, "this is not base64 (standard alphabet, with padding, no data: prefix)")


def _multipart(body: bytes, boundary: bytes | None, max_images: int) -> list[Part]:
    if not boundary or len(boundary) > 200:
        raise Refusal(422, "the multipart body has no boundary in its content type")
    parts: list[bytearray] = []
    finished = False

    def begin() -> None:
        if len(parts) == max_images:
            raise _too_many(max_images)
        parts.append(bytearray())

    def data(chunk: bytes, start: int, end: int) -> None:
        parts[-1] += chunk[start:end]

    def end() -> None:
        nonlocal finished
        finished = True

    try:
        parser = MultipartParser(
            boundary, {"on_part_begin": begin, "on_part_data": data, "on_end": end}
        )
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise Refusal(422, "the multipart body is damaged") from None
    if not finished or not parts:
        raise Refusal(422, "the multipart body has no parts, or ends too early")
    return [bytes(part) for part in parts]
