"""A guard's state as tensors, and as a file."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.core.step_report import Totals
from moetta.files import read_safetensors, write_atomically
from moetta.guard.events import EVENTS_KEPT, MODES, Event

if TYPE_CHECKING:
    from moetta.guard.guard import Guard

FORMAT = "moetta-guard"
VERSION = "6"
_COUNTS = [f.name for f in fields(Totals) if f.name != "losses"]


def collect(guard: Guard) -> dict[str, Tensor]:
    """The adapter's state, and under "guard." all that the guard remembers (copies)."""
    recovery, sampler = guard.recovery, guard.sampler
    numbers = [
        guard.steps, recovery.level, MODES.index(recovery.mode), guard.good_is_source,
        recovery.wait, sampler.credit, guard.looks_since_good, guard.drift, sampler.probation,
        recovery.learnt, recovery.from_source, recovery.troubles,
        *(getattr(guard.totals, name) for name in _COUNTS),
    ]  # fmt: skip
    out = guard.adapter.state_dict()
    out |= {f"guard.good.{k}": v.clone() for k, v in guard.good.items()}
    out |= {f"guard.watch.{k}": v for k, v in guard.watch.state().items()}
    out |= {f"guard.count.{k}": torch.tensor(v) for k, v in guard.counts.items()}
    out |= {f"guard.loss.{k}": _double(v) for k, v in guard.totals.losses.items()}
    out["guard.numbers"] = _double(numbers)
    out["guard.events"] = _double([e.numbers() for e in guard.events]).reshape(-1, 5)
    return out


def restore(guard: Guard, tensors: dict[str, Tensor]) -> None:
    """Take back what `collect` gave.

    Raises:
        ValueError: it does not fit this guard or its adapter. Nothing has changed then.
    """
    if "guard.numbers" not in tensors:
        raise ValueError(
            "this state was not saved by a guard; load it into the adapter before guarding it"
        )
    parts = _parts(tensors)
    try:  # the guard's part first, so that nothing has changed if it does not fit
        watch = guard.new_watch()
        watch.restore(parts["watch"])
        values = tensors["guard.numbers"].tolist()
        events = [Event.of_numbers(row) for row in tensors["guard.events"].tolist()]
        counted = {
            name: value if name == "entropy" else int(value)
            for name, value in zip(_COUNTS, values[12:], strict=True)
        }
        mode = MODES[int(values[2])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"this guard state is incomplete or damaged: {error}") from error
    present = guard.adapter.state_dict()
    guard.adapter.load_state_dict(parts["good"])  # refuses what does not fit, changing nothing
    try:
        guard.adapter.load_state_dict(parts["adapter"])
    except ValueError:
        guard.adapter.load_state_dict(present)
        raise
    guard.good = {k: v.clone() for k, v in parts["good"].items()}
    guard.good_is_source, guard.looks_since_good = bool(values[3]), int(values[6])
    guard.watch, guard.steps, guard.drift = watch, int(values[0]), values[7]
    recovery, sampler = guard.recovery, guard.sampler
    recovery.mode, recovery.level, recovery.wait = mode, int(values[1]), int(values[4])
    recovery.learnt, recovery.from_source = int(values[9]), bool(values[10])
    recovery.troubles = int(values[11])
    sampler.credit, sampler.probation = values[5], int(values[8])
    losses = {k: float(v) for k, v in parts["loss"].items()}
    guard.totals = Totals(**counted, losses=losses)
    guard.counts = Counter({k: int(v) for k, v in parts["count"].items()})
    guard.events = deque(events, maxlen=EVENTS_KEPT)


def save(guard: Guard, path: str | PathLike[str]) -> None:
    """Write the state to a safetensors file, atomically."""
    tensors = {k: v.cpu().contiguous() for k, v in guard.state_dict().items()}
    write_atomically(path, to_bytes(tensors, _identity(guard)))


def load(guard: Guard, path: str | PathLike[str]) -> None:
    """Restore the state from a file that `save` wrote for the same model and configuration."""
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} was not saved by a guard")
    for key, ours in _identity(guard).items():
        if metadata.get(key) != ours:
            raise ValueError(
                f"{path} was saved for another {key}: file {metadata.get(key)!r}, here {ours!r}"
            )
    guard.load_state_dict(tensors)


def _identity(guard: Guard) -> dict[str, str]:
    """What a file must match."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "method": guard.adapter.method,
        "config": json.dumps(guard.adapter.config.to_dict(), sort_keys=True),
        "guard": json.dumps(guard.options.to_dict(), sort_keys=True),
        "model": guard.adapter.fingerprint(),
    }


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _parts(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors by part: the adapter's, and the guard's good, watch, count and loss."""
    out: dict[str, dict[str, Tensor]] = {
        k: {} for k in ("adapter", "good", "watch", "count", "loss")
    }
    for key, value in tensors.items():
        if not key.startswith("guard."):
            out["adapter"][key] = value
            continue
        part, _, rest = key.removeprefix("guard.").partition(".")
        if part in out and rest:
            out[part][rest] = value
    return out
