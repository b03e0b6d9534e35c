"""Recognising finished runs by their cards, before any data or weights are touched."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from moetta import zoo
from moetta.bench.cell import Cell, is_named, resolve_config
from moetta.core.config import Config
from moetta.methods import find
from moetta.results.runs import EARLY_STOP, Run, load_card, load_run

log = logging.getLogger("moetta")


@dataclass(frozen=True)
class Found:
    """A finished run that fits a cell.

    Attributes:
        folder: its results.
        certain: False if something still on disk may have changed since the run, such as the
            user's own images; only loading it can tell.
    """

    folder: Path
    certain: bool


def find_finished(cell: Cell, root: Path) -> Found | None:
    """The finished run of this cell among the results in ``root``.

    Neither the data nor the weights need to exist. If the weights file does exist and differs from
    the one that was used, this is a different run.
    """
    for folder in _candidates(cell, root):
        run = _load(folder)
        if run is None or not _fits(cell, run.card):
            continue
        recorded, now = run.card.get("weights_file_sha256"), weights_file_sha256(cell)
        if recorded and now and recorded != now:
            continue
        known = recorded is not None or now is None  # cards up to version 0.1 lack the hash
        return Found(folder, known and not may_change(cell))
    return None


def find_unfinished(cell: Cell, root: Path) -> Path | None:
    """The folder of this cell in ``root``, if it was begun but not finished."""
    for folder in _candidates(cell, root):
        with contextlib.suppress(ValueError):
            if not is_finished(folder) and _fits(cell, load_card(folder)):
                return folder
    return None


def early_stop_file(folder: Path) -> Path:
    """The mark of a run that was stopped early.

    Whoever resumes the run removes it, because checkpoints keep only their own files.
    """
    return folder / EARLY_STOP


def _candidates(cell: Cell, root: Path) -> list[Path]:
    start = folder_name(cell.model_name, cell.stream_name, find(cell.method).name)
    return sorted(f for f in root.glob(f"{start}__*") if f"__s{cell.seed}__" in f.name)


def is_finished(folder: Path) -> bool:
    """Whether a run's results are all there; one that cannot be read has to be run again."""
    return _load(folder) is not None


def folder_name(*parts: str | None) -> str:
    """The name of a run's folder, from its parts.

    >>> folder_name("my/vit", "potpourri+", "tent", None, "s42")
    'my-vit__potpourri+__tent__s42'
    """
    return "__".join(re.sub(r"[^A-Za-z0-9.+=-]+", "-", part) for part in parts if part)


def weights_file_sha256(cell: Cell) -> str | None:
    """Hash of the file that the model's weights come from; None if there is none here."""
    if cell.weights is not None:
        files = [Path(cell.weights)]
    elif cell.model in zoo.RECIPES:
        return str(zoo.card(cell.model)["sha256"]) if cell.model in zoo.available() else None
    else:  # a Hugging Face folder; a timm name already says which weights it means
        files = sorted(Path(cell.model).glob("*.safetensors"))
    hashes = [_sha256(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file()]
    return "+".join(hashes) or None


@lru_cache(maxsize=64)
def _sha256(path: str, changed: int, size: int) -> str:
    """Hash of a file's contents, computed once for each version of it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1024)
def _complain(text: str) -> None:
    """Log a problem once, however often it is found."""
    log.warning(text)


def _load(folder: Path) -> Run | None:
    try:
        return load_run(folder)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _complain(f"{error}; this run counts as unfinished")
        return None


def _fits(cell: Cell, card: dict[str, Any]) -> bool:
    try:
        theirs = Cell.from_card(card)
    except (KeyError, TypeError, ValueError):  # another version's fields
        return False
    if card["method"] != find(cell.method).name or identity(cell) != identity(theirs):
        return False
    config = resolve_config(cell)[1]
    pixels = card["protocol"].get("preprocess") or {}
    filled = with_pixels(config, pixels.get("mean"), pixels.get("std"))
    return card["config"] in (config.to_dict(), filled.to_dict())


def with_pixels(config: Config, mean: Any, std: Any) -> Config:
    """The configuration, given how the stream normalises its images."""
    return config if mean is None else config.with_pixels(tuple(mean), tuple(std))


def identity(cell: Cell) -> Cell:
    """A cell without the fields that do not change its result or are part of its configuration."""
    mixture = cell.stream.endswith(".toml")  # which may set these two itself
    return replace(
        cell,
        method="",
        overrides=(),
        preset=None,
        variant=None,
        experiment=None,
        threads=None,
        loaders=0,
        device=cell.device.partition(":")[0],
        batch_size=cell.batch_size or (None if mixture else 64),
        order=cell.order or (None if mixture else "mixed"),
        stream=cell.stream if is_named(cell) else os.path.abspath(cell.stream),
        data=cell.data and os.path.abspath(cell.data),
        weights=cell.weights and os.path.abspath(cell.weights),
    )


def may_change(cell: Cell) -> bool:
    """Whether the cell runs on files of the user that are here and may have changed."""
    if cell.partial and cell.data is not None and Path(cell.data).is_dir():
        return True  # more images may have arrived
    own_function = ":" in cell.model and cell.weights is None
    return own_function or (not is_named(cell) and Path(cell.stream).exists())
