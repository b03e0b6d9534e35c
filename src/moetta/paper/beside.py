"""The paper's results next to ours: what it reports, and how its setup differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moetta.paper.published import (
    METHODS,
    PAPER_MODELS,
    PROPOSED,
    STREAMS,
    by_method,
    counterpart,
    counterpart_stream,
    published,
)
from moetta.results import Printed, Published, Run, number

SPOKEN = {"vit_base": "ViT-B/16", "convnext_base": "ConvNeXt-B", "vit_large": "ViT-L/16"}
COSTS = {"activated": "activated_m", "forward": "forward", "backward": "backward", "time": "time"}
COST_NOTE = "The paper's costs were measured with ViT-B/16 on ImageNet's potpourri+, on a V100 GPU."


def published_for(runs: Iterable[Run]) -> dict[tuple[str, str], Published]:
    """What the paper reports for each model and stream of the runs, or for their counterparts."""
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        found.setdefault((run.model, run.stream), run)
    return {place: _published(run) for place, run in found.items()}


def _published(run: Run) -> Published:
    key, stream = counterpart(run.model), counterpart_stream(run.stream)
    accuracy: dict[tuple[str, str | None], Printed] = {}
    if key is not None and stream is not None:
        for method in METHODS:
            if (printed := printed_accuracy(key, stream, method)) is not None:
                accuracy[method, None] = printed
        if key == "vit_base":
            column = list(STREAMS).index(stream)
            for variant, row in published()["table3"].items():
                accuracy[PROPOSED, variant] = Printed(row[column])
    images = number(run, "samples")
    return Published(
        accuracy=accuracy,
        costs={method: _costs(method) for method in METHODS},
        caveat=caveat(run.model, {run.stream: None if images is None else int(images)}),
        cost_note=COST_NOTE,
        order=METHODS,
        proposed=PROPOSED,
    )


def printed_accuracy(key: str | None, stream: str, method: str) -> Printed | None:
    """The paper's accuracy of a method, in %.

    Args:
        key: One of the paper's models, as `counterpart` names it.
        stream: Any stream; its counterpart in the paper is looked up.
        method: The method's name.

    >>> printed_accuracy("vit_base", "embedded-potpourri+", "moetta")
    Printed(mean=66.15, sd=0.06)
    """
    name = counterpart_stream(stream)
    if key is None or name is None:
        return None
    table = published()["scalability" if key == "vit_large" else "table1"][key]
    mean = by_method(table, name, method)
    return None if mean is None else Printed(mean, by_method(table, f"{name}_sd", method))


def _costs(method: str) -> dict[str, float]:
    printed = {name: by_method(published()["table2"], row, method) for name, row in COSTS.items()}
    scale = {"activated": 1000.0}
    return {name: v * scale.get(name, 1.0) for name, v in printed.items() if v is not None}


def caveat(
    model: str, streams: Mapping[str, int | None], remarks: Sequence[str] = ()
) -> str | None:
    """How our setup differs from the paper's; None if it does not, or has no counterpart there.

    Args:
        model: Our model.
        streams: Our streams, as cards name them, with their numbers of images where known.
        remarks: Further differences.

    >>> print(caveat("digits-vit", {"embedded-classical": 200}))
    Not the paper's model and data: its figures for classical are for ViT-B/16 on ImageNet \
(750,000 images), ours for digits-vit on embedded-classical (200 images). Compare the order of \
the methods and their gains, not the numbers.
    """
    key = counterpart(model)
    names = {stream: name for stream in streams if (name := counterpart_stream(stream))}
    if key is None or not names:
        return None
    other = ["model"] if PAPER_MODELS.get(model) != key else []
    if any(
        name != stream or streams[stream] not in (None, STREAMS[name])
        for stream, name in names.items()
    ):
        other.append("data")
    if not other and not remarks:
        return None
    theirs = ", ".join(names.values())
    counts = [STREAMS[name] for name in names.values()]
    text = (
        f"its figures for {theirs} are for {SPOKEN[key]} on ImageNet{_images(counts)}, "
        f"ours for {model} on {', '.join(names)}{_images([streams[s] for s in names])}"
    )
    what = f"Not the paper's {' and '.join(other)}" if other else "Not quite the paper's setup"
    return "; ".join([f"{what}: {text}", *remarks]) + (
        ". Compare the order of the methods and their gains, not the numbers."
    )


def _images(counts: Sequence[int | None]) -> str:
    known = [f"{count:,}" for count in counts if count is not None]
    return f" ({', '.join(known)} images)" if len(known) == len(counts) else ""
