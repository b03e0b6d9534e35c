"""The figures of the experts: how they are used, how alike they are, which domains they get."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from matplotlib import colormaps

from moetta.figures import FAINT, INK, PALETTE, Curve, bars, canvas, draw_lines, heat_map, on_dark
from moetta.figures.draw import count_axis, label_room, name_axis
from moetta.report.frames import Frames
from moetta.report.pictures import Picture, styles, themed
from moetta.results import Comparison, Group, Run, slug

MOST = 2  # methods whose experts are shown


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the images of a run went: counts [layers, domains, experts]."""

    layers: list[str]
    domains: list[str]
    counts: np.ndarray

    def information(self) -> np.ndarray:
        """How much an image's domain says about its expert, in bits, by layer.

        This is the mutual information minus its bias for finite counts,
        (D - 1)(E - 1) / (2 N ln 2), and at least 0: routing that ignores the domain scores 0, even
        on a short stream.
        """
        result = []
        for counts in self.counts:
            total = counts.sum()
            if not total:
                result.append(0.0)
                continue
            joint = counts / total
            apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
            known = joint > 0
            bits = float((joint[known] * np.log2(joint[known] / apart[known])).sum())
            used = ((counts.sum(1) > 0).sum() - 1) * ((counts.sum(0) > 0).sum() - 1)
            result.append(max(0.0, bits - used / (2 * total * np.log(2))))
        return np.array(result)


def routing(run: Run, frames: Frames) -> Routing | None:
    """The routing of a run over the whole stream; None if it has none."""
    rows = frames.read(run, "experts")
    if rows is None or int(rows["count"].sum()) == 0:
        return None
    layers = list(dict.fromkeys(rows["layer"].to_list()))
    domains = list(dict.fromkeys(rows["domain"].to_list()))
    counts = np.zeros((len(layers), len(domains), int(rows["expert"].max()) + 1))  # type: ignore[arg-type]
    layer_place = {name: place for place, name in enumerate(layers)}
    domain_place = {name: place for place, name in enumerate(domains)}
    where = (
        np.array([layer_place[name] for name in rows["layer"].to_list()]),
        np.array([domain_place[name] for name in rows["domain"].to_list()]),
        rows["expert"].to_numpy(),
    )
    np.add.at(counts, where, rows["count"].to_numpy())
    used = counts.sum((0, 2)) > 0
    return Routing(layers, [d for d, u in zip(domains, used, strict=True) if u], counts[:, used])


def expert_pictures(comparison: Comparison, frames: Frames) -> list[Picture]:
    """The figures of the methods that route, best first.

    The order of experts means nothing and differs between seeds, so each shows one seed.
    """
    routed = [g for g in comparison.groups if (g.first.folder / "experts.parquet").is_file()]
    routed.sort(key=lambda g: (g.variant is not None, g.protocol))
    shown: dict[str, Group] = {}
    for group in routed:
        shown.setdefault(group.method, group)
    made: list[Picture | None] = []
    for group in list(shown.values())[:MOST]:
        found = routing(group.first, frames)
        if found is not None:
            made += [_who_gets_what(comparison, group, found), _load(comparison, group, found)]
            made.append(_information(comparison, group, found))
        made.append(_similarity(comparison, group, frames))
    return [item for item in made if item is not None]


def _name(kind: str, comparison: Comparison, group: Group) -> str:
    return f"{kind}-{slug(group.method, comparison.model, comparison.stream)}"


def _whose(group: Group) -> str:
    return f"{group.label}, seed {group.first.seed}"


def _who_gets_what(comparison: Comparison, group: Group, found: Routing) -> Picture | None:
    """Whether domains that need different updates go to different experts."""
    if found.counts.shape[2] < 2 or len(found.domains) < 2:
        return None
    bits = found.information()
    layer = int(bits.argmax())
    counts = found.counts[layer]
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Domains with the same favourite are put together, so that blocks can be seen.
    order = sorted(
        range(len(shares)), key=lambda d: (int(shares[d].argmax()), -float(shares[d].max()))
    )
    experts = [str(number) for number in range(1, shares.shape[1] + 1)]
    figure = heat_map(
        shares[order],
        [found.domains[d] for d in order],
        experts,
        label="Share of the domain's images, %",
        x="Expert",
        limits=(0, max(100 / len(experts), float(shares.max()))),
        form=".0f",
    )
    most = np.log2(len(experts))
    told = "; ".join(
        f"{found.domains[d]} mostly to expert {int(shares[d].argmax()) + 1} "
        f"({shares[d].max():.0f} %)"
        for d in order
    )
    return Picture(
        _name("domains-to-experts", comparison, group),
        f"{group.label}: which domains go to which expert",
        f"{_whose(group)}, layer {found.layers[layer]}, where routing depends most on the domain. "
        f"An image's domain gives {bits[layer]:.2f} of at most {most:.2f} bits about its expert; "
        "if the router ignored the domain, all rows would be alike (0 bits).",
        f"Heat map of domains by experts: {told}.",
        figure,
    )


def _information(comparison: Comparison, group: Group, found: Routing) -> Picture | None:
    if len(found.layers) < 2 or len(found.domains) < 2:
        return None
    bits = found.information()
    style = styles([group])[group.label]
    figure = bars(bits, found.layers, "Information about\nthe domain, bits", style.color)
    top = int(bits.argmax())
    return Picture(
        _name("routing-information", comparison, group),
        f"{group.label}: where in the network routing depends on the domain",
        f"{_whose(group)}: how much an image's domain says about its expert, by layer (mutual "
        f"information, corrected for chance; at most {np.log2(found.counts.shape[2]):.2f} bits).",
        f"Bars by layer; the highest is {found.layers[top]} with {bits[top]:.2f} bits, "
        f"the mean {bits.mean():.2f}.",
        figure,
        themed([style]),
    )


def _load(comparison: Comparison, group: Group, found: Routing) -> Picture:
    load = found.counts.sum(1)
    shares = 100 * load / np.maximum(load.sum(1, keepdims=True), 1)
    experts = [str(number) for number in range(1, shares.shape[1] + 1)]
    even = 100 / len(experts)
    figure = heat_map(
        shares,
        found.layers,
        experts,
        label="Share of all images, %",
        x="Expert",
        limits=(0, max(2 * even, float(shares.max()))),
        form=".0f",
    )
    idle = int((shares < even / 10).sum())
    return Picture(
        _name("expert-load", comparison, group),
        f"{group.label}: load of the experts",
        f"{_whose(group)}: the share of images that each expert of a layer received over the whole "
        f"stream; an even load is {even:.1f} %. Experts with less than a tenth of that: {idle} of "
        f"{shares.size}.",
        f"Heat map of layers by experts; shares from {shares.min():.0f} to {shares.max():.0f} %.",
        figure,
    )


def _similarity(comparison: Comparison, group: Group, frames: Frames) -> Picture | None:
    if not (group.first.folder / "similarity.parquet").is_file():
        return None
    rows = frames.read(group.first, "similarity")
    if rows is None:
        return None
    rows = rows.with_columns(pl.col("weight_cosine", "bias_cosine").cast(float).fill_nan(None))
    mean = rows.group_by("step").agg(pl.col("weight_cosine").mean()).drop_nulls().sort("step")
    if mean.is_empty():
        return None
    layers = list(dict.fromkeys(rows["layer"].to_list()))
    figure = canvas(4.9, right=label_room(["Last layer"]), bottom=0.75)
    figure.subplots_adjust(hspace=0.35)
    top, low = figure.subplots(2, 1, height_ratios=(1.35, 1))
    shades = colormaps["viridis"](np.linspace(0.3, 0.75, max(len(layers), 2)))
    curves = []
    for place, layer in enumerate(layers):
        part = rows.filter(layer=layer).drop_nulls("weight_cosine").sort("step")
        name = {0: "First layer", len(layers) - 1: "Last layer"}.get(place, "")
        shade = "#" + "".join(f"{round(255 * value):02x}" for value in shades[place][:3])
        x, y = part["step"].to_numpy(), part["weight_cosine"].to_numpy()
        curves.append(Curve(name, x, y, color=shade, width=0.8))
    x, y = mean["step"].to_numpy(), mean["weight_cosine"].to_numpy()
    curves.append(Curve("Mean", x, y, color=INK, width=2.2))
    top.set_ylabel("Cosine of weights")
    draw_lines(top, curves)
    count_axis(top, "Batches seen")
    final = rows.filter(pl.col("step") == rows["step"].max())
    by_layer = {row["layer"]: row for row in final.iter_rows(named=True)}
    places = np.arange(len(layers))
    at_end = []
    for place, (column, name) in enumerate(
        (("weight_cosine", "Weights"), ("bias_cosine", "Biases"))
    ):
        values = [by_layer.get(layer, {}).get(column) for layer in layers]
        known = np.array([np.nan if value is None else value for value in values])
        at_end.append(Curve(name, places, known, None, *PALETTE[place], width=1.0))
    low.axhline(0, color=FAINT, linewidth=0.8)
    low.set_ylabel("Cosine at the end")
    draw_lines(low, at_end)
    name_axis(low, layers)
    first, last = float(mean["weight_cosine"][0]), float(mean["weight_cosine"][-1])
    return Picture(
        _name("expert-similarity", comparison, group),
        f"{group.label}: how alike the experts of a layer are",
        f"{_whose(group)}: mean cosine between the experts of a layer; 1 is identical, 0 "
        "unrelated. Above: over the stream, one line per layer, brighter with depth. Below: at "
        "its end.",
        f"The mean cosine of weights over all layers goes from {first:.2f} to {last:.2f}.",
        figure,
        {color: on_dark(color) for color, _ in PALETTE[:2]},
    )
