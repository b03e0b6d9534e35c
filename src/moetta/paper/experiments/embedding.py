"""The t-SNE figure: do the data sets of potpourri lie apart in the model's last features?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from moetta import figures
from moetta.bench.protocol import Prepared
from moetta.bench.run_folder import CLEAN, write_frame
from moetta.data import Domain
from moetta.data.corruptions import CLASSICAL
from moetta.nn.features import Features
from moetta.paper.experiments.domains import prepared, single
from moetta.paper.experiments.setting import Experiment, Found, Setting, no_cells
from moetta.paper.published import published
from moetta.results.tables import Column, Entry, Table, table

SAMPLES = 7500
NEIGHBOURS = 10


@torch.no_grad()
def last_features(model: Any, images: Tensor) -> Tensor:
    """What the classifier's last layer sees, one vector a sample: of a ViT, the class token."""
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        found: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
        return found.flatten(1)
    features = Features(model)
    with features.listening() as heard:
        model(images)
    return features.join(heard)


def _present(setting: Setting, _: Found, folder: Path) -> list[Table]:
    from sklearn.manifold import TSNE
    from sklearn.neighbors import NearestNeighbors

    stream = "potpourri" if "potpourri" in setting.streams else setting.classical
    made = prepared(setting, "tsne", stream)
    sets = _data_sets(made.stream.domains)
    limit = setting.common.get("limit")
    most = SAMPLES if limit is None else max(8, limit // len(sets))
    names, parts = [], []
    for name, domains in sets.items():
        features = _features(made, domains, most)
        parts.append(features)
        names += [name] * len(features)
    x = torch.cat(parts).numpy()
    perplexity = min(30.0, (len(x) - 1) / 3)
    places = TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(x)
    frame = pl.DataFrame({"data_set": names, "x": places[:, 0], "y": places[:, 1]})
    folder.mkdir(parents=True, exist_ok=True)
    write_frame(folder / "tsne.parquet", frame)
    masks = {name: (frame["data_set"] == name).to_numpy() for name in sets}
    figures.save(
        figures.points({name: places[mask] for name, mask in masks.items()}), folder / "tsne"
    )
    k = min(NEIGHBOURS, len(x) - 1)
    near = NearestNeighbors(n_neighbors=k + 1).fit(x).kneighbors(return_distance=False)[:, 1:]
    label = frame["data_set"].to_numpy()
    same = (label[near] == label[:, None]).mean(1)
    rows = [
        [
            Entry(name),
            Entry(float(mask.sum())),
            Entry(float(100 * same[mask].mean())),
            Entry(float(100 * mask.mean())),
        ]
        for name, mask in masks.items()
    ]
    columns = [
        Column("data set"),
        Column("images", digits=0),
        Column(f"of {k} neighbours, same set", "%"),
        Column("by chance", "%"),
    ]
    caption = f"Neighbours in the last features of {setting.models[0]}, without adaptation"
    notes = [setting.ours, f"The paper's figure: {published()['figures']['tsne']}."]
    return [table("tsne", caption, columns, rows, notes)]


def _data_sets(domains: tuple[Domain, ...]) -> dict[str, list[Domain]]:
    """The corruptions as one data set, each other domain as its own; clean images left out."""
    sets: dict[str, list[Domain]] = {}
    for domain in domains:
        if domain.name in CLEAN:
            continue
        corrupted = domain.name.removeprefix("c/") in CLASSICAL
        sets.setdefault("c" if corrupted else domain.name, []).append(domain)
    return sets


def _features(made: Prepared, domains: list[Domain], most: int) -> Tensor:
    batches = single(made, domains, most)
    device = made.cell.device
    parts = [last_features(made.model, batch.to(device).images).cpu() for batch in batches]
    return torch.cat(parts).float()


TSNE_FIGURE = Experiment("do the data sets lie apart?", no_cells, _present)
