"""The t-SNE figure: are the data sets of potpourri separate in the model's last features?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from moetta import figures
from moetta.bench.cell import Cell
from moetta.bench.protocol import Prepared
from moetta.bench.run_folder import CLEAN, write_frame
from moetta.data import Domain
from moetta.data.corruptions import CLASSICAL
from moetta.nn.features import Features
from moetta.paper.experiments.domains import domain_stream, prepare_whole, single_cell
from moetta.paper.experiments.kept import kept
from moetta.paper.experiments.workload import Experiment, Found, Workload, no_cells
from moetta.paper.published import published
from moetta.results.tables import Column, Entry, Table, table

SAMPLES = 7500
NEIGHBOURS = 10


@torch.no_grad()
def last_features(model: Any, images: Tensor) -> Tensor:
    """The input of the last layer, one vector per image; for a ViT, the class token."""
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        found: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
        return found.flatten(1)
    features = Features(model)
    with features.listening() as heard:
        model(images)
    return features.join(heard)


def _places(cell: Cell) -> dict[str, Tensor]:
    """For each data set [n, 3]: position in the plane, share of neighbours from the same set."""
    from sklearn.manifold import TSNE
    from sklearn.neighbors import NearestNeighbors

    made = prepare_whole(cell)
    sets = _data_sets(made.stream.domains)
    most = SAMPLES if cell.limit is None else max(8, cell.limit // len(sets))
    features = {name: _features(made, domains, most) for name, domains in sets.items()}
    label = np.repeat(list(features), [len(f) for f in features.values()])
    x = torch.cat(list(features.values())).numpy()
    perplexity = min(30.0, (len(x) - 1) / 3)
    places = TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(x)
    k = _neighbours(len(x))
    near = NearestNeighbors(n_neighbors=k + 1).fit(x).kneighbors(return_distance=False)[:, 1:]
    same = (label[near] == label[:, None]).mean(1)
    found = torch.from_numpy(np.column_stack([places, same])).double()
    return {name: found[torch.from_numpy(label == name)] for name in sets}


def _neighbours(samples: int) -> int:
    return min(NEIGHBOURS, samples - 1)


def _present(workload: Workload, _: Found, folder: Path) -> list[Table]:
    stream = "potpourri" if "potpourri" in workload.streams else workload.classical
    cell = single_cell(workload, "tsne", stream)
    sets = kept(folder / "tsne.safetensors", cell, lambda: _places(cell))
    names = [name for name, found in sets.items() for _ in found]
    together = torch.cat(list(sets.values())).numpy()
    frame = pl.DataFrame({"data_set": names, "x": together[:, 0], "y": together[:, 1]})
    write_frame(folder / "tsne.parquet", frame)
    drawn = figures.points({name: found[:, :2].numpy() for name, found in sets.items()})
    figures.save(drawn, folder / "tsne")
    rows = [
        [
            Entry(name),
            Entry(float(len(found))),
            Entry(float(100 * found[:, 2].mean())),
            Entry(100 * len(found) / len(names)),
        ]
        for name, found in sets.items()
    ]
    columns = [
        Column("data set"),
        Column("images", digits=0),
        Column(f"of {_neighbours(len(names))} neighbours, same set", "%"),
        Column("by chance", "%"),
    ]
    caption = f"Neighbours in the last features of {workload.models[0]}, without adaptation"
    notes = [
        workload.ours,
        f"The paper's figure: {published()['figures']['tsne']}.",
    ]
    return [table("tsne", caption, columns, rows, notes)]


def _data_sets(domains: tuple[Domain, ...]) -> dict[str, list[Domain]]:
    """The corruptions as one data set and each other domain as another, without clean images."""
    sets: dict[str, list[Domain]] = {}
    for domain in domains:
        if domain.name in CLEAN:
            continue
        corrupted = domain.name.removeprefix("c/") in CLASSICAL
        sets.setdefault("c" if corrupted else domain.name, []).append(domain)
    return sets


def _features(made: Prepared, domains: list[Domain], most: int) -> Tensor:
    batches = domain_stream(made, domains, most)
    device = made.cell.device
    parts = [last_features(made.model, batch.to(device).images).cpu() for batch in batches]
    return torch.cat(parts).float()


TSNE_FIGURE = Experiment("are the data sets separate?", no_cells, _present)
