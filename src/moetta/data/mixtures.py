"""A user's own mixture of domains, described by a short TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moetta.data.datasets import image_folder
from moetta.data.domains import Domain
from moetta.data.image_files import subfolders
from moetta.data.labels import LabelMap, label_map, label_scheme
from moetta.data.named_streams import stream_options
from moetta.data.orders import apportion, make_order, stratified
from moetta.data.preprocess import preprocess_for
from moetta.data.streams import Stream
from moetta.suggest import nearest

_TOP = {
    "name": str,
    "order": str,
    "options": dict,
    "seed": int,
    "batch_size": int,
    "limit": int,
    "labels": (str, dict),
    "domain": list,
}
_DOMAIN = {
    "name": str,
    "folder": str,
    "corruption": str,
    "severity": int,
    "labels": (str, dict),
    "share": (int, float),
    "limit": int,
}


@dataclass(frozen=True)
class Mixture:
    """A TOML file that was read and checked; its folders have not been opened."""

    path: Path
    table: Mapping[str, Any]

    @property
    def domains(self) -> Sequence[Mapping[str, Any]]:
        """The domains' tables."""
        listed: Sequence[Mapping[str, Any]] = self.table["domain"]
        return listed


def read_mixture(path: str | Path) -> Mixture:
    """Reads a mixture and checks it, without opening the folders.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not TOML, or has an unknown key, a value of the wrong type, or no
            domains.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"mixture file {path} does not exist")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    _check(table, _TOP, str(path))
    if not table.get("domain"):
        raise ValueError(f"{path} has no domains; add a [[domain]] with a folder for each")
    for number, domain in enumerate(table["domain"], 1):
        where = f"{path}, domain {number}"
        if not isinstance(domain, dict):
            raise ValueError(f"{where}: write each domain below a line [[domain]]")
        _check(domain, _DOMAIN, where)
        if "folder" not in domain:
            raise ValueError(f"{where} has no folder")
        if domain.get("share", 1) <= 0 or domain.get("limit", 1) < 1:
            raise ValueError(f"{where}: share and limit must be above 0")
    having = sum("share" in domain for domain in table["domain"])
    if having not in (0, len(table["domain"])):
        raise ValueError(f"{path}: give a share to every domain or to none")
    make_order(table.get("order", "mixed"), **table.get("options", {}))
    return Mixture(path, table)


def mixture(
    path: str | Path | Mixture,
    *,
    model: nn.Module | str | None = None,
    preprocess: Any = "model",
    **options: Any,
) -> Stream:
    """The stream that a TOML file describes.

    Args:
        path: The file; relative folders in it are relative to its own.
        model: The model that will see the stream, or the name of a timm model.
        preprocess: "model", "paper" or a preprocessing; see `preprocess_for`.
        **options: Options of `Stream`, which override the file's.
    """
    described = path if isinstance(path, Mixture) else read_mixture(path)
    table, base = described.table, described.path.parent
    pre = preprocess_for(model, preprocess)
    stated = {key: table[key] for key in ("seed", "batch_size", "limit", "name") if key in table}
    chosen = {"name": described.path.stem, **stated, **options}
    chosen.setdefault("order", make_order(table.get("order", "mixed"), **table.get("options", {})))
    domains = [
        image_folder(
            base / entry["folder"],
            pre,
            name=entry.get("name") or entry.get("corruption"),
            labels=labels,
            base=base,
            corruption=entry.get("corruption"),
            severity=entry.get("severity", 5),
        )
        for entry, labels in zip(described.domains, _labels(described), strict=True)
    ]
    seed = chosen.get("seed", 42)
    sizes = _sizes(described.domains, domains, chosen.get("limit") or chosen.get("length"))
    domains = [_draw(d, size, seed) for d, size in zip(domains, sizes, strict=True)]
    return Stream(domains, **stream_options(pre), **chosen)


def _labels(described: Mixture) -> list[LabelMap]:
    """The label map of each domain; sorted names are numbered over all domains together.

    If each were numbered separately, a domain that lacks a class would contradict the others.
    """
    base, default = described.path.parent, described.table.get("labels", "auto")
    folders = [base / entry["folder"] for entry in described.domains]
    # A missing folder is reported when it is opened.
    names = [subfolders(folder) if folder.is_dir() else [] for folder in folders]
    stated = [entry.get("labels", default) for entry in described.domains]
    found = {i: label_scheme(names[i]) for i, s in enumerate(stated) if s == "auto" and names[i]}
    if len(set(found.values())) > 1 and "sorted" in found.values():
        kinds = ", ".join(f"{folders[i].name}: {scheme!r}" for i, scheme in found.items())
        raise ValueError(
            f"{described.path}: the names of the class folders call for different labels "
            f"({kinds}); choose with labels = ..."
        )
    labels = [found.get(i, s) for i, s in enumerate(stated)]
    union = {name for i, s in enumerate(labels) if s == "sorted" for name in names[i]}
    return [label_map(s, sorted(union)) if s == "sorted" else s for s in labels]


def _sizes(
    entries: Sequence[Mapping[str, Any]], domains: Sequence[Domain], limit: int | None
) -> list[int]:
    """How many samples each domain gives, from its limit and its share."""
    most = [min(len(d), e.get("limit", len(d))) for e, d in zip(entries, domains, strict=True)]
    if "share" not in entries[0]:
        return most
    total = sum(e["share"] for e in entries)
    shares = [e["share"] / total for e in entries]
    # The largest stream in which no domain runs out.
    samples = min(m / s for m, s in zip(most, shares, strict=True))
    if limit is not None:
        samples = min(samples, limit)
    sizes = apportion(shares, int(samples + 1e-9))
    for entry, size in zip(entries, sizes, strict=True):
        if size < 1:
            raise ValueError(
                f"the share {entry['share']} of {entry['folder']!r} is less than one image in a "
                f"stream of {int(samples)}"
            )
    return sizes


def _draw(domain: Domain, size: int, seed: int) -> Domain:
    if size >= len(domain):
        return domain
    return domain.take(stratified(torch.zeros_like(domain.labels), domain.labels, size, seed))


def _check(table: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} has the wrong type {type(value).__name__}")
