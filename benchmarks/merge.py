"""What it costs to serve one stream from two replicas that merge what they learn.

Both replicas are simulated in one process: they take turns and are merged after every so many
updates of each. They are compared with one server that gets all the traffic and with two replicas
that never merge. Accuracy is that of all predictions, made before learning from them.

    python benchmarks/merge.py
    python benchmarks/merge.py --only-table

The stream is the embedded classical one (14,400 images, all 15 corruptions mixed), at the shipped
settings. The server gets it in batches of 64. In the same time the replicas share these 64 images
(`shared`), and each learns from its part:

- random: each image goes to either replica, as a load balancer would send it;
- domain: one replica gets the first eight corruptions, the other one the rest, so that they have
  use for different experts.

With `full`, each replica waits until it has 64 images of its own, and so takes half as many steps.

Each row is one run, appended to a file as soon as it is done; a second call runs what is missing.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import moetta
from moetta import zoo
from moetta.data import embedded
from moetta.serve.merge import Contribution, State, Tally, merge

ROOT = Path(__file__).parents[1]
BATCH = 64


@dataclass(frozen=True)
class Options:
    """What is run."""

    model: str = "digits-vit"
    methods: tuple[str, ...] = ("moetta", "tent")
    every: tuple[int, ...] = (4, 1, 16)
    """Updates of each replica between two merges."""
    how: tuple[str, ...] = ("images", "experts", "equal", "sum")
    """Ways to merge; see `moetta.serve.merge`."""
    seeds: tuple[int, ...] = (42, 43, 44)
    results: Path = ROOT / "benchmarks" / "results" / "merge.jsonl"
    only_table: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Run:
    """One row.

    Attributes:
        method: the method.
        seed: of the stream, the split and the method.
        split: one (a single server), random or domain.
        every: updates between merges; 0 is never.
        how: images, experts, equal or sum; see `moetta.serve.merge`.
        momentum: mean (merged like the parameters), zero (dropped) or own (each replica's).
        batches: shared or full.
    """

    method: str
    seed: int
    split: str
    every: int = 0
    how: str = "images"
    momentum: str = "mean"
    batches: str = "shared"


@dataclass(frozen=True)
class Traffic:
    """A whole stream in memory."""

    images: Tensor
    labels: Tensor
    domains: Tensor


def traffic(seed: int) -> Traffic:
    """The embedded classical stream, in its order."""
    batches = list(embedded.stream("classical", order="mixed", seed=seed, batch_size=BATCH))
    return Traffic(
        torch.cat([b.images for b in batches]),
        torch.cat([b.labels for b in batches]),
        torch.cat([torch.as_tensor(b.domains) for b in batches]),
    )


def split(whole: Traffic, run: Run) -> list[list[Tensor]]:
    """The images' positions, batch by batch, for each replica."""
    everything = torch.arange(len(whole.labels))
    if run.split == "one":
        return [list(everything.split(BATCH))]
    if run.split == "random":
        generator = torch.Generator().manual_seed(run.seed)
        first = torch.rand(len(whole.labels), generator=generator) < 0.5
    else:
        first = whole.domains < 8
    shares = (first, ~first)
    if run.batches == "full":
        return [list(everything[mine].split(BATCH)) for mine in shares]
    return [[rows[mine[rows]] for rows in everything.split(BATCH)] for mine in shares]


class Replica:
    """One adapter, its traffic, and what it has learnt from since the last merge."""

    def __init__(self, run: Run, model: str, batches: list[Tensor]) -> None:
        fields: dict[str, Any] = zoo.tuned(model, run.method)
        if run.method != "noadapt":
            fields["seed"] = 42  # replicas start from one state
        self.adapter = moetta.adapt(zoo.load(model), run.method, **fields)
        self.batches = batches
        self.tally = Tally()
        self.right = 0

    def step(self, number: int, whole: Traffic) -> None:
        """Answer and learn from the batch of that number, if there is one."""
        if number < len(self.batches) and len(self.batches[number]):
            rows = self.batches[number]
            predicted = self.adapter(whole.images[rows]).argmax(1)
            self.right += int((predicted == whole.labels[rows]).sum())
            assert self.adapter.last is not None
            self.tally.add(self.adapter.last, self.adapter.expert_counts())

    def contribution(self) -> Contribution:
        """As the service would send it."""
        return Contribution(self.adapter.state_dict(), self.tally.images, self.tally.experts)


def adopt(replica: Replica, state: State, momentum: str) -> None:
    """Take over a merged state."""
    if momentum != "mean":
        own = replica.adapter.state_dict() if momentum == "own" else {}
        state = {k: v for k, v in state.items() if not k.startswith("optim.")}
        state |= {k: v for k, v in own.items() if k.startswith("optim.")}
    replica.adapter.load_state_dict(state)
    replica.tally = Tally()


def measure(run: Run, model: str, whole: Traffic) -> dict[str, Any]:
    """Accuracy of one run, in per cent."""
    begun = time.perf_counter()
    replicas = [Replica(run, model, batches) for batches in split(whole, run)]
    base = replicas[0].adapter.state_dict()
    merges = 0
    for number in range(max(len(replica.batches) for replica in replicas)):
        for replica in replicas:
            replica.step(number, whole)
        if run.every and (number + 1) % run.every == 0:
            parts = [replica.contribution() for replica in replicas]
            base = merge(base, parts, run.how)  # type: ignore[arg-type]
            merges += 1
            for replica in replicas:
                adopt(replica, base, run.momentum)
    accuracy = 100 * sum(replica.right for replica in replicas) / len(whole.labels)
    seconds = round(time.perf_counter() - begun, 1)
    return {"accuracy": round(accuracy, 3), "merges": merges, "seconds": seconds}


def wanted(options: Options) -> list[Run]:
    """The runs, seed by seed."""
    runs = []
    for seed in options.seeds:
        runs.append(Run("noadapt", seed, "one"))
        runs += [Run(method, seed, "one") for method in options.methods]
        for every in options.every:
            for how in options.how:
                if how != "images" and every != options.every[0]:
                    continue
                for method in options.methods:
                    if how != "experts" or method == "moetta":  # others have none
                        runs += [Run(method, seed, w, every, how) for w in ("random", "domain")]
        for method in options.methods:
            every = options.every[0]
            runs += [Run(method, seed, way) for way in ("random", "domain")]
            runs.append(Run(method, seed, "random", every, batches="full"))
            runs += [Run(method, seed, "random", every, momentum=way) for way in ("zero", "own")]
    return runs


def read(options: Options) -> list[dict[str, Any]]:
    """The rows on file."""
    if not options.results.exists():
        return []
    return [json.loads(line) for line in options.results.read_text().splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """Points against one server with all the traffic: the mean over seeds, and the worst."""
    by = {tuple(r[k] for k in asdict(Run("", 0, ""))): r["accuracy"] for r in rows}
    one = {(m, s): a for (m, s, way, *_), a in by.items() if way == "one"}
    groups: dict[tuple[Any, ...], list[float]] = {}
    for (method, seed, way, *rest), accuracy in by.items():
        if way != "one":
            groups.setdefault((method, way, *rest), []).append(accuracy - one[method, seed])
    lines = []
    for method in dict.fromkeys(m for m, _ in one):
        found = [a for (m, _), a in one.items() if m == method]
        lines.append(f"{method}, one server: {sum(found) / len(found):.2f} %")
    lines += [
        "",
        "| method | traffic | merged every | how | momentum | batches | points | worst seed |",
        "|---|---|---:|---|---|---|---:|---:|",
    ]
    for (method, way, every, how, momentum, batches), points in groups.items():
        kind = (f"{every} updates", how, momentum, batches) if every else ("never", "", "", batches)
        mean = f"{sum(points) / len(points):+.2f}"
        lines.append(f"| {method} | {way} | {' | '.join(kind)} | {mean} | {min(points):+.2f} |")
    return "\n".join(lines)


def main(options: Options) -> None:
    """Run what is missing, then print the table."""
    torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = [{k: r[k] for k in asdict(Run("", 0, ""))} for r in read(options)]
    missing = [] if options.only_table else [r for r in wanted(options) if asdict(r) not in done]
    streams: dict[int, Traffic] = {}
    for run in missing:
        if run.seed not in streams:
            streams = {run.seed: traffic(run.seed)}
        found = measure(run, options.model, streams[run.seed])
        print(run, found, flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps({**asdict(run), **found}) + "\n")
    print(table(read(options)))


if __name__ == "__main__":
    main(tyro.cli(Options))
