"""The shipped models: small networks that come with their weights and cards."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from torch import nn

from moetta.data.catalogue import SMALL_SETS
from moetta.zoo.recipes import RECIPES, Recipe, recipe

_WEIGHTS = files("moetta.zoo").joinpath("weights")


def _file(name: str, ending: str) -> Traversable:
    recipe(name)  # refuses an unknown name
    found = _WEIGHTS.joinpath(f"{name}.{ending}")
    if not found.is_file():
        raise FileNotFoundError(
            f"this installation has no weights for {name}; train the model: "
            f"moetta train-model {name} --out {_WEIGHTS}"
            + (" --data FOLDER" if recipe(name).data in SMALL_SETS else "")
        )
    return found


def available() -> list[str]:
    """Names of the shipped models whose weights are installed."""
    return [n for n in RECIPES if _WEIGHTS.joinpath(f"{n}.safetensors").is_file()]


def card(name: str) -> dict[str, Any]:
    """How a model was trained and how accurate it is: recipe, hash of the weights, accuracies."""
    found: dict[str, Any] = json.loads(_file(name, "json").read_text())
    return found


def load(name: str, device: str | torch.device = "cpu") -> nn.Module:
    """A shipped model, in eval mode.

    Its ``pretrained_cfg`` holds mean, std and input size, as timm's models do, so that streams can
    check the preprocessing.

    Raises:
        ValueError: There is no such model, or its weights do not match its card.
    """
    data = _file(name, "safetensors").read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != card(name)["sha256"]:
        raise ValueError(
            f"the weights of {name} are damaged: expected sha256 {card(name)['sha256']}, got "
            f"{found}; reinstall the package"
        )
    return assemble(recipe(name), from_bytes(data)).to(device)


def assemble(made_by: Recipe, weights: dict[str, torch.Tensor]) -> nn.Module:
    """The recipe's network with these weights, in float32 and eval mode."""
    with torch.random.fork_rng(
        devices=[]
    ):  # the initial weights must not advance the global generator
        model = made_by.shape.build(made_by.classes)
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    model.pretrained_cfg = preprocessing(made_by)  # type: ignore[assignment]
    return model.eval()


def preprocessing(made_by: Recipe) -> dict[str, Any]:
    """The preprocessing that the model expects, in the form of timm's configs."""
    return {
        "architecture": made_by.name,
        "tag": "moetta",
        "input_size": (3, made_by.shape.image, made_by.shape.image),
        "fixed_input_size": True,
        "mean": made_by.mean,
        "std": made_by.std,
        "num_classes": made_by.classes,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
