"""One process per run: a lock in the run's folder."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from moetta.bench.interrupts import Stopped

try:
    import fcntl
except ImportError:  # on Windows nothing prevents two commands from running the same cell
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 30.0
log = logging.getLogger("moetta")


@contextlib.contextmanager
def locked(
    folder: Path, patience: float | None = None, stop: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold a run's lock; the system drops it when the process ends, however it ends.

    Args:
        folder: the run's folder.
        patience: how many seconds to wait for another process that holds it.
        stop: asked while waiting.

    Raises:
        BlockingIOError: another process keeps holding it.
        Stopped: ``stop`` said yes.
    """
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            _wait_for(lock, folder, LOCK_SECONDS if patience is None else patience, stop)
        yield
    with contextlib.suppress(FileNotFoundError):
        (folder / "lock").unlink()


def _wait_for(lock: IO[str], folder: Path, patience: float, stop: Callable[[], bool]) -> None:
    """Take the lock; a worker whose command was killed holds it until its batch is done."""
    begun, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - begun >= patience:
                raise BlockingIOError(
                    f"another command is running this cell in {folder}; wait for it, stop it, or "
                    "choose another folder with --out"
                ) from None
        if not told:
            log.warning("%s is in use by another process; waiting up to %.0f s", folder, patience)
            told = True
        if stop():
            raise Stopped
        time.sleep(0.2)
