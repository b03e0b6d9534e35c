"""The paper's figures for what a report shows, where it has any."""

from __future__ import annotations

from dataclasses import dataclass

from moetta.paper.published import (
    PAPER_MODELS,
    STREAMS,
    by_method,
    counterpart,
    counterpart_stream,
    published,
)
from moetta.results.groups import Group, Setting
from moetta.results.runs import number

SPOKEN = {"vit_base": "ViT-B/16", "convnext_base": "ConvNeXt-B", "vit_large": "ViT-L/16"}
COSTS = {"activated": "activated_m", "forward": "forward", "backward": "backward", "time": "time"}


@dataclass(frozen=True)
class Printed:
    """A figure the paper prints, in %, with its sd where it has one."""

    mean: float
    sd: float | None = None


def accuracy(setting: Setting, group: Group) -> Printed | None:
    """The paper's accuracy of a method in the counterpart of this setting."""
    key, name = counterpart(setting.model), counterpart_stream(setting.stream)
    if key is None or name is None:
        return None
    if group.variant:
        return _ablation(key, list(STREAMS).index(name), group)
    section = "scalability" if key == "vit_large" else "table1"
    table = published()[section][key]
    mean = by_method(table, name, group.method)
    return None if mean is None else Printed(mean, by_method(table, f"{name}_sd", group.method))


def _ablation(key: str, column: int, group: Group) -> Printed | None:
    row = published()["table3"].get(group.variant)
    if key != "vit_base" or group.method != "moetta" or row is None:
        return None
    return Printed(row[column])


def cost(group: Group, what: str) -> float | None:
    """The paper's cost of a method (ViT-B/16 on potpourri+), by the keys of `COSTS`."""
    return None if group.variant else by_method(published()["table2"], COSTS[what], group.method)


def caveat(setting: Setting) -> str | None:
    """How the paper's setting differs from this one; None if it does not, or has no figures."""
    key, name = counterpart(setting.model), counterpart_stream(setting.stream)
    if key is None or name is None:
        return None
    theirs, ours = STREAMS[name], number(setting.groups[0].runs[0], "samples")
    other = ["model"] if PAPER_MODELS.get(setting.model) != key else []
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
