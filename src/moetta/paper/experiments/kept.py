"""Keeps what an experiment without a grid computes in a file, so that it is computed only once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.bench.cell import Cell, resolve_config
from moetta.bench.finished import identity, may_change, weights_file_sha256
from moetta.files import read_safetensors, write_atomically

log = logging.getLogger("moetta")


def kept(path: Path, cell: Cell, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors computed for a cell, in their order; read from the file if they are there.

    As with finished runs, neither the data nor the weights need to exist then.
    """
    found = _read(path, cell)
    if found is not None and not may_change(cell):
        return found
    try:
        computed = compute()
    except (ValueError, OSError) as error:
        if found is None:
            raise
        reason = str(error).splitlines()[0]
        log.warning("%s is shown as it was computed; it cannot be checked: %s", path, reason)
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {
        f"{place:03d} {name}": t.contiguous() for place, (name, t) in enumerate(computed.items())
    }
    metadata = {"cell": _described(cell), "weights": weights_file_sha256(cell) or ""}
    write_atomically(path, to_bytes(named, metadata))
    return computed


def _read(path: Path, cell: Cell) -> dict[str, Tensor] | None:
    try:
        tensors, metadata = read_safetensors(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s; computing it again", error)
        return None
    recorded, now = metadata.get("weights"), weights_file_sha256(cell)
    if metadata.get("cell") != _described(cell) or (recorded and now and recorded != now):
        return None
    return {name.partition(" ")[2]: tensors[name] for name in sorted(tensors)}


def _described(cell: Cell) -> str:
    fields = [asdict(identity(cell)), resolve_config(cell)[1].to_dict()]
    return json.dumps(fields, sort_keys=True)
