"""The figures that the paper prints, as data."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

METHODS = ("noadapt", "tent", "eata", "cotta", "sar", "deyo", "mgtta", "becotta", "moetta")
"""The order of methods in all of the paper's lists."""


@cache
def published() -> dict[str, Any]:
    """The whole file."""
    text = files("moetta.bench").joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def by_method(table: dict[str, Any], name: str, method: str) -> float | None:
    """One of a list's figures; None where the paper prints none.

    >>> by_method(published()["table1"]["vit_base"], "classical", "moetta")
    67.2
    """
    values = table.get(name.replace("+", "_plus"))
    if values is None or method not in METHODS:
        return None
    value = float(values[METHODS.index(method)])
    return None if math.isnan(value) else value
