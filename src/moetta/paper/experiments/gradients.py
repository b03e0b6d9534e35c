"""Figure 1: the directions in which Tent moves the model on each corruption alone."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta import figures
from moetta.bench.meter import pairwise_cosine
from moetta.bench.protocol import Prepared
from moetta.data import Domain
from moetta.files import read_safetensors, write_atomically
from moetta.paper.experiments.domains import prepared, single
from moetta.paper.experiments.setting import Experiment, Found, Setting, no_cells
from moetta.paper.published import published
from moetta.results.tables import Column, Entry, Table, table

PRINTED = 0.69


def direction(made: Prepared, domain: Domain, limit: int | None) -> Tensor:
    """How far the trained parameters have moved after one pass over a domain."""
    adapter = made.adapter()
    start = torch.cat([p.detach().flatten() for p in adapter.trained.values()]).clone()
    for batch in single(made, [domain], limit):
        adapter(batch.to(made.cell.device).images)
    end = torch.cat([p.detach().flatten() for p in adapter.trained.values()])
    return (end - start).cpu()


def _present(setting: Setting, _: Found, folder: Path) -> list[Table]:
    made = prepared(setting, "gradient-cosine", setting.classical, "tent")
    limit = setting.common.get("limit")
    share = None if limit is None else max(1, limit // len(made.stream.domains))
    kept = folder / "directions"
    kept.mkdir(parents=True, exist_ok=True)
    moved = []
    aside = Console(stderr=True)  # stdout is for results, with --json for nothing else
    for domain in track(
        made.stream.domains, "Tent, domain by domain", console=aside, transient=True
    ):
        # Finished domains are not run again.
        file = kept / f"{made.key}-{share}-{domain.name.replace('/', '-')}.safetensors"
        if not file.exists():
            write_atomically(file, to_bytes({"direction": direction(made, domain, share)}))
        moved.append(read_safetensors(file)[0]["direction"])
    still = [d.name for d, m in zip(made.stream.domains, moved, strict=True) if not m.any()]
    if still:
        raise ValueError(f"Tent did not move at all on {', '.join(still)}: no direction to compare")
    cosines = pairwise_cosine(torch.stack(moved))
    names = [domain.name.removeprefix("c/") for domain in made.stream.domains]
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
        f"Cosine between the directions of Tent, {setting.models[0]}: lower-triangle mean "
        f"{mean:.2f}, paper {PRINTED:.2f} ({mean - PRINTED:+.2f}); least {float(lower.min()):.2f}"
    )
    printed = f"The paper's figure: {published()['figures']['gradient_cosine']}."
    return [table("gradient-cosine", caption, columns, rows, [setting.ours, printed])]


GRADIENT_COSINE = Experiment("do domains pull in one direction?", no_cells, _present)
