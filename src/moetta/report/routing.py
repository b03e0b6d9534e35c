"""The pictures of the experts: who is used, how alike they are, and who gets which domain."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import numpy as np
import polars as pl
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moetta.report.figures import FAINT, INK, STYLES, Picture, canvas, picture
from moetta.report.frames import Frames
from moetta.report.plots import heat_map
from moetta.results import Comparison, Group, Run, slug

MOST = 2  # methods whose experts are shown


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the samples of a run went: counts [layers, domains, experts]."""

    layers: list[str]
    domains: list[str]
    counts: np.ndarray

    def information(self) -> np.ndarray:
        """What a sample's domain tells of its expert, in bits, by layer.

        Mutual information less its bias for finite counts, (D - 1)(E - 1) / (2 N ln 2), and at
        least 0: routing that ignores the domain scores 0, also on a short stream.
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
    place = {name: i for i, name in enumerate(layers)}
    row = {name: i for i, name in enumerate(domains)}
    for layer, domain, expert, count in rows.select("layer", "domain", "expert", "count").rows():
        counts[place[layer], row[domain], expert] += count
    used = counts.sum((0, 2)) > 0
    return Routing(layers, [d for d, u in zip(domains, used, strict=True) if u], counts[:, used])


def expert_pictures(comparison: Comparison, frames: Frames) -> list[Picture]:
    """The pictures of the methods that route, MoETTA first; experts have no order, so one seed."""
    routed = [g for g in comparison.groups if (g.first.folder / "experts.parquet").is_file()]
    routed.sort(key=lambda g: (g.method != "moetta", g.variant is not None, g.protocol))
    shown = list({group.method: group for group in reversed(routed)}.values())[::-1][:MOST]
    made: list[Picture | None] = []
    for group in shown:
        found = routing(group.first, frames)
        if found is not None:
            made += [_who_gets_what(comparison, group, found), _load(comparison, group, found)]
            made.append(_information(comparison, group, found))
        made.append(_similarity(comparison, group, frames))
    return [item for item in made if item is not None]


def _name(kind: str, comparison: Comparison, group: Group) -> str:
    return f"{kind}-{slug(group.method, comparison.model, comparison.stream)}"


def _whose(group: Group) -> str:
    return f"{group.label}, seed {group.runs[0].seed}"


def _who_gets_what(comparison: Comparison, group: Group, found: Routing) -> Picture | None:
    """The idea of the paper in one picture: domains that need different updates part ways."""
    if found.counts.shape[2] < 2 or len(found.domains) < 2:
        return None
    bits = found.information()
    layer = int(bits.argmax())
    counts = found.counts[layer]
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Domains with the same favourite stand together, so that blocks can be seen.
    order = sorted(
        range(len(shares)), key=lambda d: (int(shares[d].argmax()), -float(shares[d].max()))
    )
    experts = [str(number) for number in range(1, shares.shape[1] + 1)]
    figure = heat_map(
        shares[order],
        [found.domains[d] for d in order],
        experts,
        "Share of the domain's images, %",
        "cividis",
        (0, max(100 / len(experts), float(shares.max()))),
        ".0f",
    )
    figure.axes[0].set_xlabel("Expert")
    figure.axes[0].xaxis.set_label_position("top")
    most = np.log2(len(experts))
    told = "; ".join(
        f"{found.domains[d]} mostly to expert {int(shares[d].argmax()) + 1} "
        f"({shares[d].max():.0f} %)"
        for d in order
    )
    return picture(
        _name("domains-to-experts", comparison, group),
        f"{group.label}: which domains go to which expert",
        f"{_whose(group)}, layer {found.layers[layer]}: the layer whose routing depends most on "
        f"the domain. An image's domain tells {bits[layer]:.2f} bits of its expert, of at most "
        f"{most:.2f}; if the router ignored the domain, all rows would be alike (0 bits).",
        f"Heat map of domains by experts: {told}.",
        figure,
    )


def _depth_ticks(axes: object, layers: list[str]) -> None:
    """Layer names on the x axis: as many as can be read."""
    step = max(1, -(-len(layers) // 14))
    places = list(range(0, len(layers), step))
    names = [layers[p] if len(layers[p]) <= 16 else f"…{layers[p][-15:]}" for p in places]
    axes.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=7)  # type: ignore[attr-defined]


def _information(comparison: Comparison, group: Group, found: Routing) -> Picture | None:
    if len(found.layers) < 2 or len(found.domains) < 2:
        return None
    bits = found.information()
    figure = canvas(2.6)
    axes = figure.subplots()
    color = STYLES.get(group.method, STYLES["moetta"])[0]
    axes.bar(np.arange(len(bits)), bits, color=color, width=0.75)
    axes.set_ylabel("Domain's share in\nthe routing, bits")
    axes.set_ylim(0, max(0.05, float(bits.max()) * 1.1))
    axes.grid(visible=False, axis="x")
    _depth_ticks(axes, found.layers)
    top = int(bits.argmax())
    return picture(
        _name("routing-information", comparison, group),
        f"{group.label}: where in the network routing knows the domain",
        f"{_whose(group)}: what an image's domain tells of its expert, layer by layer "
        f"(mutual information, corrected for chance; at most {np.log2(found.counts.shape[2]):.2f} "
        "bits).",
        f"Bars by layer; the highest is {found.layers[top]} with {bits[top]:.2f} bits, "
        f"the mean {bits.mean():.2f}.",
        figure,
    )


def _load(comparison: Comparison, group: Group, found: Routing) -> Picture:
    load = found.counts.sum(1)
    shares = 100 * load / np.maximum(load.sum(1, keepdims=True), 1)
    experts = [str(number) for number in range(1, shares.shape[1] + 1)]
    even = 100 / len(experts)
    figure = heat_map(
        shares, found.layers, experts, "Share of all images, %", "cividis",
        (0, max(2 * even, float(shares.max()))), ".0f",
    )  # fmt: skip
    figure.axes[0].set_xlabel("Expert")
    figure.axes[0].xaxis.set_label_position("top")
    idle = int((shares < even / 10).sum())
    return picture(
        _name("expert-load", comparison, group),
        f"{group.label}: load of the experts",
        f"{_whose(group)}: how many images each expert of a layer received over the whole stream; "
        f"an even load is {even:.1f} %. Experts with less than a tenth of that: {idle} of "
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
    layers = list(dict.fromkeys(rows["layer"].to_list()))
    figure = canvas(4.9)
    top, low = figure.subplots(2, 1, height_ratios=(1.35, 1))
    shades = matplotlib.colormaps["viridis"](np.linspace(0.3, 0.75, max(len(layers), 2)))
    for place, layer in enumerate(layers):
        part = rows.filter(layer=layer).drop_nulls("weight_cosine").sort("step")
        top.plot(part["step"], part["weight_cosine"], color=shades[place], linewidth=0.8)
    mean = rows.group_by("step").agg(pl.col("weight_cosine").mean()).drop_nulls().sort("step")
    if mean.is_empty():
        return None
    top.plot(mean["step"], mean["weight_cosine"], color=INK, linewidth=2.2, label="Mean of layers")
    top.plot([], [], color=shades[0], linewidth=1, label="First layer")
    top.plot([], [], color=shades[-1], linewidth=1, label="Last layer")
    top.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.1)
    top.set_xlabel("Batches seen")
    top.set_ylabel("Cosine of experts'\nweights")
    top.xaxis.set_major_locator(MaxNLocator(6))
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    final = rows.filter(pl.col("step") == rows["step"].max())
    by_layer = {row["layer"]: row for row in final.iter_rows(named=True)}
    for column, marker, color, name in (
        ("weight_cosine", "o", STYLES["moetta"][0], "Weights"),
        ("bias_cosine", "s", STYLES["mgtta"][0], "Biases"),
    ):
        values = [by_layer.get(layer, {}).get(column) for layer in layers]
        low.plot(
            np.arange(len(layers)),
            [np.nan if value is None else value for value in values],
            color=color, marker=marker, markersize=4, linewidth=1, label=name,
        )  # fmt: skip
    low.axhline(0, color=FAINT, linewidth=0.8)
    low.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.1)
    low.set_ylabel("Cosine at the end")
    _depth_ticks(low, layers)
    first, last = float(mean["weight_cosine"][0]), float(mean["weight_cosine"][-1])
    return picture(
        _name("expert-similarity", comparison, group),
        f"{group.label}: how alike the experts of a layer are",
        f"{_whose(group)}: mean cosine between the experts of a layer; 1 is identical, 0 "
        "unrelated. Above: over the stream, one line a layer, dark to bright with depth. Below: "
        "at its end.",
        f"Mean cosine of weights over all layers goes from {first:.2f} to {last:.2f}.",
        figure,
    )
