"""Runs kept at an fsspec URL (s3://, gs://, file://): copied to and from ordinary folders."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from moetta.files import write_atomically

LAST = ("summary.json", "progress.json")
"""These files make the others count, so they are copied after them."""
TRIES = 5
"""How often a folder is read again if its files change meanwhile."""


class Store:
    """Run folders at a URL, with the same files as on a disk.

    There are no locks at a URL. That is safe: a file is there whole or not at all, the file that
    makes others count comes last, and two processes that run the same cell write the same results.

    Args:
        url: anything that fsspec understands; a plain path is a folder on this machine.

    Raises:
        ValueError: fsspec does not know this kind of URL, or lacks the package for it.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be used to store runs: {error}") from error
        # An earlier listing may lack what other machines have written since.
        self._files.use_listings_cache = False
        self.url = url
        self._known: dict[Path, tuple[int, int]] = {}

    def read(self, name: str) -> bytes:
        """Contents of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._files.invalidate_cache()
        data: bytes = self._files.cat_file(f"{self._path}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file: whole or not at all."""
        target = PurePosixPath(f"{self._path}/{name}")
        temporary = str(target.with_name(f".{target.name}.{uuid.uuid4().hex}"))
        self._files.makedirs(str(target.parent), exist_ok=True)
        try:
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, str(target))
        except BaseException:
            if self._files.exists(temporary):
                self._files.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        path = f"{self._path}/{name}"
        self._files.invalidate_cache()
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def folders(self) -> list[str]:
        """The names of the run folders."""
        return sorted({name.partition("/")[0] for name in self._list("") if "/" in name})

    def fetch(self, names: Iterable[str], root: Path) -> None:
        """Copy run folders into ``root``; `send` then sends only what has changed since."""
        for name in names:
            for left in reversed(range(TRIES)):
                try:
                    self._fetch(name, root)
                    break
                except FileNotFoundError:  # a newer checkpoint has replaced this one
                    if not left:
                        raise

    def _fetch(self, name: str, root: Path) -> None:
        for file in sorted(self._list(name), key=_last):
            target = root / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, self.read(f"{name}/{file}"), sync=False)
            self._known[target] = _version(target)

    def send(self, root: Path) -> None:
        """Copy the files in ``root`` that are new or have changed, and remove old checkpoints."""
        here = [p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")]
        changed = set()
        for path in sorted(here, key=lambda path: _last(path.name)):
            if path.name == "lock" or self._known.get(path) == (version := _version(path)):
                continue
            self.write(path.relative_to(root).as_posix(), path.read_bytes())
            self._known[path] = version
            changed.add(path.relative_to(root).parts[0])
        for name in changed:
            checkpoint = root / name / "checkpoint"
            if not checkpoint.exists():
                self.remove(f"{name}/checkpoint")
                continue
            for file in self._list(f"{name}/checkpoint"):
                if not (checkpoint / file).exists():
                    self.remove(f"{name}/checkpoint/{file}")

    def _list(self, name: str) -> list[str]:
        """The files below a folder, relative to it, without those that are being written."""
        folder = f"{self._path}/{name}".rstrip("/")
        self._files.invalidate_cache()
        found: Any = self._files.find(folder)
        start = len(self._files._strip_protocol(folder)) + 1
        names = [path[start:] for path in found]
        return [n for n in names if not any(part.startswith(".") for part in n.split("/"))]


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _last(name: str) -> bool:
    return PurePosixPath(name).name in LAST
