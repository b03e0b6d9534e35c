"""How MoETTA's experts become different: along the stream, and at its end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from moetta import figures
from moetta.bench.cell import Cell
from moetta.bench.meter import mean_cosine, pairwise_cosine
from moetta.files import read_safetensors
from moetta.paper.experiments.workload import Experiment, Found, Workload
from moetta.paper.published import published
from moetta.results.tables import Column, Entry, Table, table


def _cells(workload: Workload, experiment: str, stream: str) -> list[Cell]:
    return workload.cells(
        experiment, (42,), model=workload.models[0], method="moetta", stream=stream
    )


def _similarity_cells(workload: Workload) -> list[Cell]:
    return _cells(workload, "expert-similarity", workload.classical)


def _similarity(workload: Workload, found: Found, folder: Path) -> list[Table]:
    run = next(iter(found.values()))
    frame = run.frame("similarity")
    moments = frame["step"].unique().sort()
    early, middle, last = (moments[int(q * (len(moments) - 1))] for q in (0.1, 0.5, 1.0))
    rows = []
    for layer in frame["layer"].unique(maintain_order=True):
        of_layer = frame.filter(pl.col("layer") == layer)
        row = [Entry(layer)]
        for column in ("weight_cosine", "bias_cosine"):
            for step in (early, middle, last):
                row.append(Entry(of_layer.filter(pl.col("step") == step)[column].item()))
        rows.append(row)
    for column in ("weight_cosine", "bias_cosine"):
        curves = {
            str(layer[0]): (part["step"].to_list(), part[column].to_list())
            for layer, part in frame.group_by("layer", maintain_order=True)
        }
        mean = frame.group_by("step", maintain_order=True).agg(pl.col(column).mean())
        curves["mean"] = (mean["step"].to_list(), mean[column].to_list())
        drawn = figures.lines(curves, "batch", "mean pairwise cosine", leaders=["mean"])
        figures.save(drawn, folder / f"expert-{column}")
    steps = [f"batch {early}", f"batch {middle}", "end"]
    columns = [Column("layer")]
    columns += [Column(f"{what}, {step}") for what in ("weights", "biases") for step in steps]
    caption = f"Mean cosine between experts, {workload.models[0]}, {workload.classical}"
    printed = f"The paper's figure: {published()['figures']['expert_similarity']}."
    return [
        table(
            "expert-similarity",
            caption,
            columns,
            rows,
            [workload.ours, printed],
        )
    ]


def _heat_cells(workload: Workload) -> list[Cell]:
    return _cells(workload, "expert-heatmaps", workload.richest)


def _heat(workload: Workload, found: Found, folder: Path) -> list[Table]:
    run = next(iter(found.values()))
    tensors, _ = read_safetensors(run.folder / "experts.safetensors")
    layers = run.frame("similarity")["layer"].unique(maintain_order=True)
    maps: dict[str, dict[str, np.ndarray]] = {"weight": {}, "bias": {}}
    rows = []
    for layer in layers:
        row = [Entry(layer)]
        for kind, of_kind in maps.items():
            experts = tensors[f"{layer}.{kind}"]
            cosines = pairwise_cosine(experts)
            of_kind[layer] = cosines.numpy()
            pairs = cosines[~np.eye(len(cosines), dtype=bool)]
            used = Entry(float(len(cosines)))
            row += [Entry(mean_cosine(experts)), Entry(float(pairs.min()) if len(pairs) else None)]
        rows.append([*row, used])
    for kind, of_kind in maps.items():
        figures.save(figures.heat_maps(of_kind), folder / f"expert-{kind}-heatmaps")
    columns = [Column("layer")]
    columns += [Column(f"{k}, {what}") for k in ("weights", "biases") for what in ("mean", "least")]
    columns += [Column("experts used", digits=0)]
    caption = f"Cosines between experts after {workload.richest}, {workload.models[0]}"
    printed = f"The paper's figure: {published()['figures']['expert_heatmaps']}."
    return [table("expert-heatmaps", caption, columns, rows, [workload.ours, printed])]


SIMILARITY = Experiment("how experts diverge along the stream", _similarity_cells, _similarity)
HEATMAPS = Experiment("how similar experts are at the end", _heat_cells, _heat)
