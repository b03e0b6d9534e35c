"""Which class each folder is, and which classes a domain has."""

from __future__ import annotations

import json
import pkgutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data.imagenet_info import ImageNetInfo
from torch import Tensor

from moetta.data.domains import Domain

LabelMap = str | Path | Mapping[str, int]


@cache
def imagenet_synsets(subset: Literal["1k", "r", "a"] = "1k") -> tuple[str, ...]:
    """The synsets of ImageNet-1k in class order, or the 200 of -R or -A, from timm's lists."""
    if subset == "1k":
        return tuple(ImageNetInfo("imagenet-1k").label_names())
    listed = pkgutil.get_data("timm.data", f"_info/imagenet_{subset}_synsets.txt")
    if listed is None:
        raise FileNotFoundError(f"this timm has no synset list for ImageNet-{subset.upper()}")
    return tuple(listed.decode().split())


def label_scheme(folders: Iterable[str]) -> Literal["imagenet", "numbers", "sorted"]:
    """How to number class folders with these names; see `label_map`."""
    names = set(folders)
    if names <= set(imagenet_synsets()):
        return "imagenet"
    return "numbers" if all(map(str.isdecimal, names)) else "sorted"


def label_map(
    labels: LabelMap, folders: Sequence[str], *, base: Path | None = None
) -> dict[str, int]:
    """The class of each folder name.

    Args:
        labels: "sorted" numbers the folders in sorted order. "imagenet" looks up synsets such as
            n01440764 in ImageNet-1k. "numbers" takes the names 0, 1, 2 ... as they are. "auto" is
            "imagenet" or "numbers" if all names fit, else "sorted". A table gives the class of each
            name; a path names a JSON or TOML file with such a table.
        folders: The folder names that need a class.
        base: What a relative path is relative to; by default the working directory.

    Raises:
        ValueError: If a folder has no class; names such folders.
    """
    table: Mapping[str, Any]
    if labels == "auto":
        labels = label_scheme(folders)
    if labels == "sorted":
        table = {name: i for i, name in enumerate(sorted(folders))}
    elif labels == "imagenet":
        table = {wnid: i for i, wnid in enumerate(imagenet_synsets())}
    elif labels == "numbers":
        table = {name: int(name) for name in folders if name.isdecimal()}
    elif isinstance(labels, Mapping):
        table = labels
    else:
        table = _read_table((base or Path()) / labels)
    bad = [f"{k} = {v!r}" for k, v in table.items() if type(v) is not int or v < 0]
    if bad:
        raise ValueError(
            f"label map: class numbers must be integers of at least 0, got {_some(bad)}"
        )
    missing = sorted(set(folders) - set(table))
    if missing:
        what = labels if isinstance(labels, str | Path) else "the table"
        raise ValueError(
            f"label map {str(what)!r} has no class for {len(missing)} of {len(folders)} folders: "
            f"{_some(missing)}; it knows {_some(table)}"
        )
    return {name: table[name] for name in folders}


def logit_mask(domains: Sequence[Domain], num_classes: int) -> Tensor:
    """Which classes each domain has, for scoring among those only.

    Only ImageNet-R and -A, of the paper's domains, name their classes; the others have all.

    Args:
        domains: The domains of a stream.
        num_classes: The number of logits.

    Returns:
        Bool [len(domains), num_classes]; index it with `Batch.domains`:
        `logits.masked_fill(~mask[batch.domains], float("-inf"))`.
    """
    mask = torch.ones(len(domains), num_classes, dtype=torch.bool)
    for row, domain in zip(mask, domains, strict=True):
        if domain.classes is not None:
            if max(domain.classes) >= num_classes:
                raise ValueError(
                    f"domain {domain.name!r} has class {max(domain.classes)}, "
                    f"but there are only {num_classes} logits"
                )
            row[:] = False
            row[list(domain.classes)] = True
    return mask


def _read_table(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".json", ".toml"):
        raise ValueError(
            f'label map {str(path)!r}: expected "auto", "sorted", "imagenet", "numbers", a table, '
            "or a path that ends in .json or .toml"
        )
    if not path.is_file():
        raise FileNotFoundError(f"label map file {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # both decoders' errors, and bad UTF-8
        raise ValueError(f"label map file {path} cannot be read: {error}") from error
    if not isinstance(table, Mapping):
        raise ValueError(f"label map file {path} must hold one table of name to class number")
    return table


def _some(names: Iterable[Any], most: int = 5) -> str:
    listed = [str(name) for name in names]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
