"""The paper's two propositions, tested by simulation."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from moetta.nn.moe import Routing, balance_loss
from moetta.paper.experiments.workload import Experiment, Found, Workload, no_cells
from moetta.results.tables import Column, Entry, Table, table

DIMENSIONS = (1, 2, 4, 16, 64, 256, 1024)
TRIALS = 20_000


def cosines(d: int, trials: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    """Cosines between a - c and b - c for Gaussian a, b, c in d dimensions."""
    draw = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(3, trials, d, generator=draw, dtype=torch.float64) * sigma).unbind()
    return torch.cosine_similarity(a - c, b - c, dim=1)


def _first(trials: int) -> Table:
    """Proposition 1: the expected cosine is 1/2 + O(1/d), whatever the variance."""
    rows = []
    for d in DIMENSIONS:
        drawn = cosines(d, trials)
        mean, error = float(drawn.mean()), float(drawn.std() / math.sqrt(trials))
        wide = float(cosines(d, trials, sigma=10.0, seed=1).mean())
        rows.append(
            [
                Entry(str(d)),
                Entry(mean),
                Entry(error),
                Entry(0.5),
                Entry(mean - 0.5, signed=True),
                Entry((mean - 0.5) * d, error * d, signed=True),
                Entry(wide),
            ]
        )
    columns = [
        Column("d"),
        Column("mean cosine, ours", digits=4),
        Column("standard error", digits=4),
        Column("limit, paper", digits=4),
        Column("ours - paper", digits=4),
        Column("times d", digits=3),
        Column("with 10 times the sd", digits=4),
    ]
    caption = "Proposition 1: the cosine between two accumulated gradients tends to 1/2"
    note = (
        f"{trials:,} draws per row. It holds: the distance from 1/2 falls like 1/d (times d it "
        "stays bounded) and does not depend on the variance. It assumes Gaussian parameters around "
        "one mean; those of a trained model are not."
    )
    return table("theory-1", caption, columns, rows, [note])


COUNTEREXAMPLE = ((0.51, 0.49), (0.51, 0.49), (0.0, 1.0))


def losses(experts: int, batch: int, trials: int, concentration: float, seed: int = 0) -> Tensor:
    """Balance losses of random top-1 routers: rows of probabilities from a Dirichlet."""
    torch.manual_seed(seed)
    drawn = torch.distributions.Dirichlet(torch.full((experts,), concentration))
    found = []
    for p in drawn.sample((trials, batch)):
        found.append(balance_loss(Routing(p, p.argmax(1, keepdim=True))))
    return torch.stack(found)


def _second(trials: int) -> Table:
    """Proposition 2: the balance loss of a top-1 router is at least 1; it is not."""
    p = torch.tensor(COUNTEREXAMPLE)
    loss = float(balance_loss(Routing(p, p.argmax(1, keepdim=True))))

    def row(name: str, least: float, share: float | None) -> list[Entry]:
        return [
            Entry(name),
            Entry(least),
            Entry(1.0),
            Entry(least - 1, signed=True),
            Entry(share),
        ]

    rows = [row("three samples: (.51, .49), (.51, .49), (0, 1)", loss, None)]
    with torch.random.fork_rng(devices=[]):
        for experts, batch in ((2, 3), (2, 64), (9, 64)):
            for concentration in (0.3, 3.0):
                drawn = losses(experts, batch, trials, concentration)
                name = f"random, {experts} experts, batch {batch}, Dirichlet {concentration:g}"
                below = float(100 * (drawn < 1 - 1e-6).double().mean())
                rows.append(row(name, float(drawn.min()), below))
    columns = [
        Column("router"),
        Column("least loss, ours", digits=4),
        Column("bound, paper", digits=4),
        Column("ours - paper", digits=4),
        Column("below 1", "% of draws"),
    ]
    caption = "Proposition 2: is the load-balancing loss at least 1?"
    note = (
        f"{trials:,} routers per row. It does not hold: the proof equates the mean of the chosen "
        "probabilities with the sum of F_e P_e, and these differ. Nothing in the software relies "
        "on it."
    )
    return table("theory-2", caption, columns, rows, [note])


def _present(workload: Workload, _: Found, __: Path) -> list[Table]:
    limit = workload.common.get("limit")
    trials = TRIALS if limit is None else min(TRIALS, max(2, limit))
    return [_first(trials), _second(max(2, trials // 20))]


THEORY = Experiment("the two propositions, by simulation", no_cells, _present)
