"""Hyper-parameters chosen on the validation streams, for each shipped model and method."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from moetta.methods.registry import find
from moetta.zoo.recipes import recipe


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(files("moetta.zoo").joinpath("tuned.toml").read_text())


def tuned(model: str, method: str) -> dict[str, Any]:
    """Fields for ``moetta.adapt(model, method, **fields)``; empty if none were tuned.

    They were chosen by ``benchmarks/tune.py`` on the four extra corruptions, which no test stream
    contains.

    >>> tuned("digits-vit", "noadapt")
    {}
    """
    recipe(model)
    find(method)
    return dict(_table().get(model, {}).get(method, {}))
