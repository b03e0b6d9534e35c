"""`moetta models`: the named models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import timm
from rich.table import Table

from moetta import zoo
from moetta.commands.console import make_console
from moetta.paper.published import PAPER_MODELS


@dataclass(frozen=True)
class Models:
    """List the named models: those shipped with the package, and the paper's."""

    json: bool = False
    """Print JSON."""


def models(options: Models) -> None:
    """Print what `--model` accepts."""
    listed = [*(_shipped(name) for name in zoo.RECIPES), *map(_paper, PAPER_MODELS)]
    if options.json:
        print(json.dumps(listed, indent=2))
        return
    console = make_console()
    table = Table()
    table.add_column("model", no_wrap=True)
    for name in ("from", "classes", "input", "clean accuracy %", "weights"):
        table.add_column(name)
    for row in listed:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
    console.print(
        "Also accepted: any timm name (timm.list_models()), your own module:function, or a Hugging "
        "Face folder. --weights FILE.safetensors loads weights from a local file.",
        highlight=False,
    )


def _shipped(name: str) -> dict[str, Any]:
    recipe, here = zoo.recipe(name), name in zoo.available()
    accuracy = zoo.card(name).get("accuracy", {}) if here else {}
    return {
        "model": name,
        "from": "shipped",
        "classes": recipe.classes,
        "input": recipe.shape.image,
        "clean_accuracy": accuracy.get("clean"),
        "weights": "here" if here else "moetta train-model",
    }


def _paper(name: str) -> dict[str, Any]:
    cfg = timm.get_pretrained_cfg(name)
    assert cfg is not None
    return {
        "model": name,
        "from": "timm (paper)",
        "classes": cfg.num_classes,
        "input": cfg.input_size[-1],
        "clean_accuracy": None,
        "weights": "downloaded when used",
    }
