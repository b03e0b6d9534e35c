"""An adapter's state: collected, checked, restored, written and read."""

from __future__ import annotations

import json
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.core.step_report import Totals
from moetta.files import read_safetensors, write_atomically

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter

FORMAT = "moetta-state"
VERSION = "1"
_COUNTERS = [f.name for f in fields(Totals) if f.name != "losses"]


def collect(adapter: Adapter) -> dict[str, Tensor]:
    """Copies of everything that influences the adapter's future."""
    out = {f"param.{name}": p.detach().clone() for name, p in adapter.trained.items()}
    if adapter.optimizer is not None:
        for name, parameter in adapter.trained.items():
            for key, value in adapter.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    out[f"optim.{name}.{key}"] = torch.as_tensor(value).detach().clone()
    for name, tensor in adapter.running.items():
        if tensor is not None:
            out[f"running.{name}"] = tensor.detach().clone()
    # Counts stay exact in float64 up to 2^53.
    numbers = [float(adapter.steps), *(float(getattr(adapter.totals, n)) for n in _COUNTERS)]
    out["counters"] = torch.tensor(numbers, dtype=torch.float64)
    for name, value in adapter.totals.losses.items():
        out[f"loss.{name}"] = torch.tensor(value, dtype=torch.float64)
    return out


def restore(adapter: Adapter, tensors: dict[str, Tensor]) -> None:
    """Put a collected state back; everything is checked before anything is changed."""
    problems = _differences(adapter, tensors)
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ValueError(
            f"this state does not fit this {adapter.method} adapter: "
            f"{'; '.join(problems[:5])}{more}"
        )
    # The caller may be in inference mode, whose tensors nothing could learn from afterwards.
    with torch.inference_mode(False), torch.no_grad():
        for name, parameter in adapter.trained.items():
            parameter.copy_(tensors[f"param.{name}"])
        if adapter.optimizer is not None:
            adapter.optimizer.state.clear()
            for name, parameter in adapter.trained.items():
                prefix = f"optim.{name}."
                held = {
                    key.removeprefix(prefix): _like(value, parameter, key)
                    for key, value in tensors.items()
                    if key.startswith(prefix)
                }
                if held:
                    adapter.optimizer.state[parameter].update(held)
        for name in adapter.running:
            value = tensors.get(f"running.{name}")
            adapter.running[name] = None if value is None else value.to(adapter.device, copy=True)
    numbers = tensors["counters"].tolist()
    adapter.steps = int(numbers[0])
    counts = {
        name: value if name == "entropy" else int(value)
        for name, value in zip(_COUNTERS, numbers[1:], strict=True)
    }
    losses = {
        k.removeprefix("loss."): v.item() for k, v in tensors.items() if k.startswith("loss.")
    }
    adapter.totals = Totals(**counts, losses=losses)


def _like(value: Tensor, parameter: Tensor, key: str) -> Tensor:
    # Adam keeps its step count on the CPU; everything else lives beside its parameter.
    return value.clone() if key.endswith(".step") else value.to(parameter.device, copy=True)


def _differences(adapter: Adapter, tensors: dict[str, Tensor]) -> list[str]:
    """What does not fit in ``tensors``, each in a few words."""
    expected: dict[str, Tensor | None] = {"counters": torch.zeros(len(_COUNTERS) + 1).double()}
    expected |= {f"param.{name}": p for name, p in adapter.trained.items()}
    expected |= {f"running.{name}": t for name, t in adapter.running.items()}
    # Every state has what a new adapter has; the rest (momentum, averages) comes with time.
    problems = [f"{key} is missing" for key in adapter._initial if key not in tensors]
    for key, value in tensors.items():
        like = expected.get(key)
        if key.startswith("optim."):
            name, _, slot = key.removeprefix("optim.").rpartition(".")
            if name in adapter.trained:
                like = expected[key] = value if slot == "step" else adapter.trained[name]
        if key not in expected and not key.startswith("loss."):
            problems.append(f"{key} is unknown here")
        elif not isinstance(value, Tensor):
            problems.append(f"{key} is not a tensor")
        elif like is not None and (like.shape, like.dtype) != (value.shape, value.dtype):
            problems.append(f"{key} is {_kind(value)}, here {_kind(like)}")
    return problems


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def save(adapter: Adapter, path: str | PathLike[str]) -> None:
    """Write the state with its identity (method, configuration, model), atomically."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "method": adapter.method,
        "config": json.dumps(adapter.config.to_dict(), sort_keys=True),
        "model": adapter.fingerprint(),
    }
    tensors = {k: v.cpu().contiguous() for k, v in adapter.state_dict().items()}
    write_atomically(path, to_bytes(tensors, metadata))


def load(adapter: Adapter, path: str | PathLike[str]) -> None:
    """Restore what `save` wrote; refuse a file that is not for this adapter."""
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not a state saved by moetta")
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{path} has state version {metadata.get('version')}; this moetta reads {VERSION}"
        )
    if lost := [key for key in ("method", "config", "model") if key not in metadata]:
        raise ValueError(f"{path} does not say its {' and '.join(lost)}; save the state again")
    if metadata["method"] != adapter.method:
        raise ValueError(
            f"{path} was saved by method {metadata['method']!r}, this adapter is {adapter.method!r}"
        )
    theirs, ours = _read_config(metadata["config"]), adapter.config.to_dict()
    if theirs is None:
        raise ValueError(f"{path} has a configuration that cannot be read; save the state again")
    changed = [
        f"{key}: file {theirs.get(key)!r}, here {ours.get(key)!r}"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key) and key not in adapter.held_in_state
    ]
    if changed:
        raise ValueError(f"{path} was saved under another configuration: {'; '.join(changed)}")
    if metadata["model"] != adapter.fingerprint():
        raise ValueError(
            f"{path} was saved for a model with other source weights "
            f"(file {metadata['model'][:12]}, here {adapter.fingerprint()[:12]})"
        )
    adapter.load_state_dict(tensors)


def _read_config(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
