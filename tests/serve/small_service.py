"""A service around a tiny model: milliseconds per step, everything else as in production."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

import moetta
from helpers.models import CLASSES, small_vit
from moetta.core.adapter import Adapter
from moetta.serve import Classifier, Settings, create_app
from moetta.serve.tenant import Answering

TOKEN = "a-token-for-tests"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
LABELS = tuple("abcde")


def prepare(image: Image.Image) -> Any:
    """As the tiny model takes images."""
    return image.resize((16, 16))


def classifier(model: nn.Module | None = None) -> Classifier:
    assert len(LABELS) == CLASSES
    return Classifier("small", model or small_vit(), prepare, (0.5,) * 3, (0.25,) * 3, LABELS)


def builder(method: str = "tent", **config: Any) -> Callable[[], tuple[Answering, Adapter]]:
    model = small_vit()

    def build() -> tuple[Answering, Adapter]:
        adapter = moetta.adapt(model, method, **config)
        return adapter, adapter

    return build


def app(method: str = "tent", lr: float | None = None, **settings: Any) -> Any:
    settings = {"max_wait_ms": 1.0, "learn_samples": 4, "admin_token": TOKEN, **settings}
    settings.setdefault("allowed_hosts", ("testserver",))
    config = {} if lr is None else {"lr": lr}
    return create_app(classifier(), builder(method, **config), Settings(**settings))


def picture(seed: int = 0, kind: str = "PNG", side: int = 24, **options: Any) -> bytes:
    """The bytes of an image file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()
