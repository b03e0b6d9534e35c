"""The paper's figures for what a report shows, where it has any."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moetta.bench.results import number
from moetta.report.groups import ORDER, Group, Setting

# What the paper ran: the model's full name, and how many images each stream has.
WEIGHTS = {
    "vit_base": "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "convnext_base": "convnext_base.fb_in22k_ft_in1k",
    "vit_large": "vit_large_patch16_224.augreg_in21k_ft_in1k",
}
SPOKEN = {"vit_base": "ViT-B/16", "convnext_base": "ConvNeXt-B", "vit_large": "ViT-L/16"}
STREAMS = {
    "classical": ("classical", 750_000),
    "potpourri": ("potpourri", 838_389),
    "potpourri+": ("potpourri_plus", 888_389),
}
COSTS = {"activated": "activated_m", "forward": "forward", "backward": "backward", "time": "time"}


@dataclass(frozen=True)
class Printed:
    """A figure the paper prints, in %, with its sd where it has one."""

    mean: float
    sd: float | None = None


@cache
def published() -> dict[str, Any]:
    """All printed figures; empty where the benchmark's data file is not installed."""
    try:
        text = (resources.files("moetta.bench") / "published.toml").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        return {}
    return tomllib.loads(text)


def counterpart(model: str) -> str | None:
    """Which of the paper's models stands for this one: the same family, if there is one."""
    for part, key in (("convnext", "convnext_base"), ("vit_large", "vit_large")):
        if part in model:
            return key
    return "vit_base" if "vit" in model else None


def beside(stream: str) -> str | None:
    """Which of the paper's streams stands for this one, by its name on the card.

    >>> beside("embedded-potpourri+"), beside("cifar10-c"), beside("pets")
    ('potpourri+', 'classical', None)
    """
    name = stream.removeprefix("embedded-")
    name = "classical" if name == "cifar10-c" else name  # corruptions alone
    return name if name in STREAMS else None


def accuracy(setting: Setting, group: Group) -> Printed | None:
    """The paper's accuracy of a method in the counterpart of this setting."""
    key, name = counterpart(setting.model), beside(setting.stream)
    if key is None or name is None or group.method not in ORDER:
        return None
    if group.variant:
        return _ablation(key, list(STREAMS).index(name), group)
    table = published().get("table1", {}).get(key) or published().get("scalability", {}).get(key)
    stream = STREAMS[name][0]
    if not table or stream not in table:
        return None
    place = ORDER[group.method]
    mean = table[stream][place]
    sd = table.get(f"{stream}_sd", {place: math.nan})[place]
    return None if math.isnan(mean) else Printed(mean, None if math.isnan(sd) else sd)


def _ablation(key: str, column: int, group: Group) -> Printed | None:
    row = published().get("table3", {}).get(group.variant)
    if key != "vit_base" or group.method != "moetta" or row is None:
        return None
    return Printed(row[column])


def cost(group: Group, what: str) -> float | None:
    """The paper's cost of a method (ViT-B/16 on potpourri+), by the keys of `COSTS`."""
    row = published().get("table2", {}).get(COSTS[what])
    if row is None or group.variant or group.method not in ORDER:
        return None
    return float(row[ORDER[group.method]])


def caveat(setting: Setting) -> str | None:
    """How the paper's setting differs from this one; None if it does not, or has no figures."""
    key, name = counterpart(setting.model), beside(setting.stream)
    if key is None or name is None or not published():
        return None
    theirs, ours = STREAMS[name][1], number(setting.groups[0].runs[0], "samples")
    other = ["model"] if setting.model != WEIGHTS[key] else []
    if name != setting.stream or ours != theirs:
        other.append("data")
    if not other:
        return None
    count = "an unknown number of" if ours is None else f"{ours:,.0f}"
    return (
        f"Not the paper's {' and '.join(other)}: its figures for {name} are of {SPOKEN[key]} on "
        f"ImageNet ({theirs:,} images), ours of {setting.model} on {setting.stream} ({count} "
        "images). Compare the order of the methods and their gains, not the numbers."
    )
