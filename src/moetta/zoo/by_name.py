"""Models by name: shipped ones, timm's, a Hugging Face folder, or your own function."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from pathlib import Path

import timm
import torch
from torch import nn

from moetta.files import read_safetensors
from moetta.suggest import nearest
from moetta.zoo.recipes import RECIPES, recipe
from moetta.zoo.shipped_models import load


def load_model(name: str, weights: str | None = None, device: str = "cpu") -> nn.Module:
    """A classifier in eval mode; the last ones are kept, for the cells that follow.

    Args:
        name: a shipped model, a timm name (best with its tag), ``module:function`` (called without
            arguments), or a folder with a saved Hugging Face model.
        weights: a safetensors file to load instead of the model's own weights.
        device: where to put it.

    Raises:
        ValueError: there is no such model (names the nearest), or the weights do not fit.
        FileNotFoundError: the weights are missing.
    """
    file = None if weights is None else Path(weights)
    changed = file.stat().st_mtime_ns if file is not None and file.is_file() else 0
    return _loaded(name, weights, device, changed)


def forget_models() -> None:
    """Forget the models that are kept in memory."""
    _loaded.cache_clear()


@lru_cache(maxsize=2)
def _loaded(name: str, weights: str | None, device: str, changed: int) -> nn.Module:
    if ":" in name:
        model = _from_function(name)
    elif Path(name).is_dir():
        model = _from_folder(Path(name))
    elif name in RECIPES:
        model = load(name)
    else:
        model = _from_timm(name, pretrained=weights is None)
    if weights is not None:
        _load_weights(model, weights, name)
    return model.to(device).eval()


def load_architecture(name: str) -> nn.Module:
    """A model by name as `load_model` takes it, with arbitrary weights: for counting its layers.

    Raises:
        ValueError: there is no such model (names the nearest).
    """
    with torch.random.fork_rng(devices=[]):
        if ":" in name:
            return _from_function(name)
        if Path(name).is_dir():
            return _from_folder(Path(name))
        if name in RECIPES:
            made_by = recipe(name)
            return made_by.shape.build(made_by.classes)
        return _from_timm(name, pretrained=False)


def _from_function(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:  # an installed command does not search the current folder
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model {name!r}: {error}; run from the folder that holds it, or set PYTHONPATH"
        ) from error
    except AttributeError:
        names = [n for n in dir(sys.modules[module_name]) if not n.startswith("_")]
        raise ValueError(
            f"{module_name} has no function {attribute!r}; {nearest(attribute, names)}"
        ) from None
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face model: it has no config.json")
    try:
        from transformers import AutoModelForImageClassification
    except ImportError as error:
        raise ValueError("a Hugging Face folder needs: pip install 'moetta[hf]'") from error
    try:
        model: nn.Module = AutoModelForImageClassification.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True
        )
    except OSError as error:
        raise ValueError(f"{folder}: {error}") from error
    return model


def _from_timm(name: str, pretrained: bool) -> nn.Module:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        known = [*RECIPES, *timm.list_models(), *timm.list_pretrained()]
        raise ValueError(
            f"no model {name!r}; {nearest(name, known)} (or module:function, or a Hugging Face "
            "folder; `moetta models` lists those with a name)"
        )
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        raise ValueError(f"timm has no weights {name!r}; {nearest(name, tagged)}")
    if pretrained and not tagged:
        raise ValueError(f"timm has no weights for {name!r}; give --weights FILE.safetensors")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # the hub fails in many ways, with one remedy
        raise FileNotFoundError(
            f"the weights of {name} could not be loaded ({type(error).__name__}: {error}). On a "
            f"machine with a network, download model.safetensors from the timm/{name} repository; "
            "then pass --weights model.safetensors"
        ) from error
    return model


def _load_weights(model: nn.Module, weights: str, name: str) -> None:
    tensors, _ = read_safetensors(weights)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit {name}: {error}") from error
