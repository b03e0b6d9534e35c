"""Figure 1: the direction in which Tent moves the model on each single corruption."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta import figures
from moetta.bench.cell import Cell
from moetta.bench.meter import pairwise_cosine
from moetta.bench.protocol import Prepared
from moetta.data import Domain
from moetta.files import read_safetensors, write_atomically
from moetta.paper.experiments.domains import domain_stream, prepare_whole, single_cell
from moetta.paper.experiments.kept import kept
from moetta.paper.experiments.workload import Experiment, Found, Workload, no_cells
from moetta.paper.published import published
from moetta.results.tables import Column, Entry, Table, table

PRINTED = 0.69
log = logging.getLogger("moetta")


def direction(made: Prepared, domain: Domain, limit: int | None) -> Tensor:
    """How far the trained parameters have moved after one pass over a domain."""
    adapter = made.adapter()
    start = torch.cat([p.detach().flatten() for p in adapter.trained.values()]).clone()
    for batch in domain_stream(made, [domain], limit):
        adapter(batch.to(made.cell.device).images)
    end = torch.cat([p.detach().flatten() for p in adapter.trained.values()])
    return (end - start).cpu()


def _directions(cell: Cell, folder: Path) -> dict[str, Tensor]:
    """The direction of each domain; finished domains are kept, in case the command is stopped."""
    made = prepare_whole(cell)
    domains = made.stream.domains
    share = None if cell.limit is None else max(1, cell.limit // len(domains))
    parts = folder / "directions"
    parts.mkdir(parents=True, exist_ok=True)
    moved: dict[str, Tensor] = {}
    for place, domain in enumerate(domains, 1):
        file = parts / f"{made.key}-{share}-{domain.name.replace('/', '-')}.safetensors"
        if not file.exists():
            log.info("Tent on domain %d of %d: %s", place, len(domains), domain.name)
            write_atomically(file, to_bytes({"direction": direction(made, domain, share)}))
        moved[domain.name] = read_safetensors(file)[0]["direction"]
    still = [name for name, vector in moved.items() if not vector.any()]
    if still:
        raise ValueError(f"Tent did not move at all on {', '.join(still)}: no direction to compare")
    return moved


def _present(workload: Workload, _: Found, folder: Path) -> list[Table]:
    cell = single_cell(workload, "gradient-cosine", workload.classical, "tent")
    moved = kept(folder / "directions.safetensors", cell, lambda: _directions(cell, folder))
    cosines = pairwise_cosine(torch.stack(list(moved.values())))
    names = [name.removeprefix("c/") for name in moved]
    lower = cosines[torch.ones_like(cosines).tril(-1).bool()]
    figures.save(
        figures.heat_map(cosines.tolist(), names, names, label="cosine"), folder / "gradient-cosine"
    )
    off = (cosines.sum(1) - 1) / (len(names) - 1)
    rows = [
        [Entry(f"{i} {name}"), Entry(float(off[i])), *map(Entry, cosines[i].tolist())]
        for i, name in enumerate(names)
    ]
    columns = [Column("domain"), Column("mean with others")]
    columns += [Column(str(i)) for i in range(len(names))]
    mean = float(lower.mean())
    caption = (
        f"Cosine between the directions of Tent, {workload.models[0]}: lower-triangle mean "
        f"{mean:.2f}, paper {PRINTED:.2f} ({mean - PRINTED:+.2f}); least {float(lower.min()):.2f}"
    )
    printed = f"The paper's figure: {published()['figures']['gradient_cosine']}."
    return [table("gradient-cosine", caption, columns, rows, [workload.ours, printed])]


GRADIENT_COSINE = Experiment("do domains pull in one direction?", no_cells, _present)
