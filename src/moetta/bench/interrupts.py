"""Ctrl-C and SIGTERM: both ask a grid to stop cleanly, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_requested = threading.Event()


class Stopped(Exception):
    """A cell was asked to stop before its first batch: there is nothing to save."""


def requested() -> bool:
    """Whether this process has been asked to stop."""
    return _requested.is_set()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within the block a signal only sets `requested`, so that no batch is cut in half.

    A second signal stops at once; the last checkpoint remains.
    """

    def handle(_: int, __: FrameType | None) -> None:
        if _requested.is_set():
            raise KeyboardInterrupt
        _requested.set()

    _requested.clear()
    with _handlers(handle):
        yield


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """A process started within the block ignores both signals from its first moment."""
    with _handlers(signal.SIG_IGN):
        yield


def ignore() -> None:
    """Ignore both signals for good: a worker leaves them to the process that started it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _handlers(handler: signal._HANDLER) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
