"""States on disk: whole files that prove themselves, the last few kept.

A file's name holds its number and the hash of its content, so that one rename makes a snapshot
appear together with its checksum.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("moetta.serve")
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})\.safetensors")


@dataclass(frozen=True, order=True)
class Snapshot:
    """A state on disk.

    Attributes:
        number: counts up; the highest is the latest.
        digest: the start of the SHA-256 of its content.
        path: where it is.
    """

    number: int
    digest: str
    path: Path

    def is_whole(self) -> bool:
        """Whether the content still has the hash it was saved with."""
        try:
            return _digest(self.path) == self.digest
        except OSError:
            return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


class Snapshots:
    """The snapshots of one tenant, in one folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.numbers: list[int] = []
        """The latest first, as they were when last looked at; any thread may read them."""

    def found(self) -> list[Snapshot]:
        """All of them, the latest first, checked or not."""
        found: list[Snapshot] = []
        if not self.folder.is_dir():
            return found
        for path in self.folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append(Snapshot(int(match[1]), match[2], path))
        found.sort(reverse=True)
        self.numbers = [snapshot.number for snapshot in found]
        return found

    def save(self, write: Callable[[Path], None]) -> Snapshot:
        """Add one and remove the oldest beyond ``keep``.

        Args:
            write: writes the state to the path it is given, and syncs it.

        Raises:
            OSError: it could not be written. The earlier ones are as they were.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        earlier = self.found()
        for unfinished in self.folder.glob(".*"):  # of a process that was killed while it wrote
            unfinished.unlink(missing_ok=True)
        temporary = self.folder / ".new.safetensors"
        try:
            write(temporary)
            number = earlier[0].number + 1 if earlier else 1
            digest = _digest(temporary)
            path = self.folder / f"{number:08d}-{digest}.safetensors"
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self.folder)
        for old in earlier[self.keep - 1 :]:
            old.path.unlink(missing_ok=True)
        self.numbers = [number, *(old.number for old in earlier[: self.keep - 1])]
        return Snapshot(number, digest, path)

    def restore(self, load: Callable[[Path], None], number: int | None = None) -> Snapshot | None:
        """Load the latest good one, or the one of that number; None if there is none.

        Damaged ones are passed over with a warning.
        """
        for snapshot in self.found():
            if number is not None and snapshot.number != number:
                continue
            if not snapshot.is_whole():
                log.warning("snapshot %s is damaged; trying the one before", snapshot.path)
                continue
            try:
                load(snapshot.path)
            except (ValueError, OSError) as error:
                log.warning("snapshot %s cannot be loaded: %s", snapshot.path, error)
                continue
            return snapshot
        return None


def _sync(folder: Path) -> None:
    """Make a rename last through a power failure, where the system lets folders be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
