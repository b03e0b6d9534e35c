"""The front door: one function."""

from __future__ import annotations

from typing import Any

from torch import nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config
from moetta.methods import find, of_config


def adapt(
    model: nn.Module,
    method: str | Config = "moetta",
    *,
    preset: str = "paper",
    source: Source = None,
    inplace: bool = False,
    **config: Any,
) -> Adapter:
    """Wrap a classifier so that it learns from the images it classifies.

    Args:
        model: any classifier with LayerNorm, GroupNorm or BatchNorm layers that returns logits, or
            an object with ``.logits``.
        method: a method's name (`moetta.list_methods()` lists them), ``"package.module:Class"`` for
            a method of yours, or a configuration object.
        preset: the settings to start from: "paper", "released" (what the authors' code does), or
            another preset of the method. Only with a name.
        source: source images, for the methods that need them: a tensor, an iterable of batches, or
            the path of a file written by ``adapter.save_source``.
        inplace: adapt this very object; ``adapter.unwrap()`` undoes it. Otherwise the object is
            left alone, and the memory of its frozen weights is shared, not copied.
        **config: fields of the method's configuration. Only with a name.

    Returns:
        The adapter; call it as you would call the model.

    Raises:
        ValueError: an unknown method, preset or field (the message names the nearest), missing
            source images, or a model without layers that the method can train.
    """
    if isinstance(method, Config):
        if config or preset != "paper":
            raise ValueError(
                "pass fields and preset with a method's name, not with a config object"
            )
        found, settings = of_config(method), method
    else:
        found = find(method)
        settings = found.config.preset(preset, **config)
    return found.adapter(model, settings, source, inplace)
