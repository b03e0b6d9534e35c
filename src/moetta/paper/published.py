"""What the paper ran and its published results, as data."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from moetta.data.catalogue import spec_of_card

METHODS = ("noadapt", "tent", "eata", "cotta", "sar", "deyo", "mgtta", "becotta", "moetta")
"""The paper's methods, in the order of its tables."""
PROPOSED = "moetta"
"""The method the paper proposes."""
# Full names, since timm has changed the weights behind bare names over the years.
PAPER_MODELS = {
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": "vit_base",
    "convnext_base.fb_in22k_ft_in1k": "convnext_base",
    "vit_large_patch16_224.augreg_in21k_ft_in1k": "vit_large",
}
"""The paper's models and their keys in `published`."""
STREAMS = {"classical": 750_000, "potpourri": 838_389, "potpourri+": 888_389}
"""The paper's streams and their numbers of images."""


@cache
def published() -> dict[str, Any]:
    """All of published.toml."""
    text = files("moetta.paper").joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def by_method(table: dict[str, Any], name: str, method: str) -> float | None:
    """A method's value in a row of a table; None if the paper does not give one.

    >>> by_method(published()["table1"]["vit_base"], "classical", "moetta")
    67.2
    """
    values = table.get(name.replace("+", "_plus"))
    if values is None or method not in METHODS:
        return None
    value = float(values[METHODS.index(method)])
    return None if math.isnan(value) else value


def counterpart(model: str) -> str | None:
    """The model in the paper that corresponds to a model, if there is one.

    >>> counterpart("digits-convnext"), counterpart("vit_tiny_patch16_224"), counterpart("resnet50")
    ('convnext_base', 'vit_base', None)
    """
    for part, found in (("convnext", "convnext_base"), ("vit_large", "vit_large")):
        if part in model:
            return found
    return "vit_base" if "vit" in model else None


def counterpart_stream(stream: str) -> str | None:
    """The paper's stream that corresponds to a stream, if there is one.

    >>> [counterpart_stream(name) for name in ("embedded-potpourri+", "potpourri", "pets")]
    ['potpourri+', 'potpourri', None]
    """
    spec = spec_of_card(stream)
    return None if spec is None else spec.counterpart
