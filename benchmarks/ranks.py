"""What it costs to share a batch among ranks: throughput, bytes per step, and a model of scaling.

Two processes of one thread each take turns in one run: in every round the first classifies a batch
alone while the second waits, then both share it. The ratio of the two is the speed-up. On a busy
machine wall time depends on what else runs; the CPU time of the busier rank does so much less.
Bytes are counted where they are handed over (`Ranks.sent`). Those of a larger model are computed
from its layers, by a formula that the counted ones confirm.

    python benchmarks/ranks.py --rounds 20
    python benchmarks/ranks.py --methods moetta tent sar --batch 32
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import moetta
from moetta.nn.ranks import Ranks, even

LINKS = {
    "NVLink, 300 GB/s, 5 us": (300e9, 5e-6),
    "InfiniBand, 100 Gb/s, 10 us": (12.5e9, 10e-6),
    "Ethernet, 10 Gb/s, 50 us": (1.25e9, 50e-6),
}
"""Bandwidth in bytes per second and latency in seconds of one hop."""
GPUS = (1, 2, 8, 16, 32, 64)


@dataclass(frozen=True)
class Options:
    """Throughput with 1 and 2 ranks, bytes exchanged per step, and a model of scaling."""

    model: str = "vit_tiny_patch16_224"
    """A timm model to run; it gets random weights, since only the cost matters."""
    large: str = "vit_base_patch16_224"
    """A timm model whose bytes are computed without running it."""
    methods: tuple[str, ...] = ("moetta", "tent", "sar")
    """Methods to run."""
    batch: int = 32
    """Images per batch."""
    rounds: int = 12
    """Rounds; each takes one step alone and one shared."""
    images_per_second: float = 800.0
    """What one GPU adapts, for the model of scaling: an assumption, not a measurement."""
    json: bool = False
    """Print the measurements as JSON."""


@dataclass(frozen=True)
class Measured:
    """One method on 1 and 2 ranks.

    Attributes:
        method: its name.
        alone: seconds per step in one process, median.
        shared: seconds per step on two ranks, median.
        speedup: median over the rounds of alone / shared, wall time.
        cpu_speedup: the same with the CPU time of the busier rank.
        sent: bytes that a rank hands over per step, by kind.
        calls: exchanges per step, by kind.
        trained: numbers that are trained.
    """

    method: str
    alone: float
    shared: float
    speedup: float
    cpu_speedup: float
    sent: dict[str, float]
    calls: dict[str, float]
    trained: int


def build(name: str) -> nn.Module:
    """The model, with a head confident enough for samples to pass the entropy filters."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        model.get_classifier().weight.normal_(0, 1.0)
    return model


def images(count: int, seed: int, side: int) -> Tensor:
    """Images that differ from each other: coarse random fields."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 7, 7, generator=generator)
    return torch.nn.functional.interpolate(coarse, side, mode="bicubic")


def work(rank: int, options: Options, folder: str) -> None:
    """One rank's part of the measurement; the first one writes what was found."""
    torch.set_num_threads(1)
    limit = timedelta(minutes=10)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    model = build(options.model)
    side = timm.data.resolve_model_data_config(model)["input_size"][-1]
    found = [_measure(m, model, options, side, group, rank) for m in options.methods]
    ranks, times = Ranks(group), []
    for _ in range(200):
        begun = time.perf_counter()
        ranks.tell(None)
        times.append(time.perf_counter() - begun)
    if rank == 0:
        facts = {"methods": [asdict(m) for m in found], "message": min(times)}
        Path(folder, "found.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    method: str,
    model: nn.Module,
    options: Options,
    side: int,
    group: dist.ProcessGroup,
    rank: int,
) -> Measured:
    alone = moetta.adapt(model, method)
    shared = moetta.adapt(model, method, process_group=group)
    assert shared.ranks is not None
    start = sum(even(options.batch, 2)[:rank])
    own = slice(start, start + even(options.batch, 2)[rank])
    rows: list[tuple[float, float, float, float]] = []
    for turn in range(options.rounds + 1):
        batch = images(options.batch, turn, side)
        times = []
        for adapter in (alone, shared):
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            if adapter is shared or rank == 0:
                adapter(batch[own] if adapter is shared else batch)
            times += [time.perf_counter() - begun, time.process_time() - cpu]
            dist.barrier()
        both = torch.tensor(times[3], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        rows.append((times[0], times[1], times[2], float(both)))
        if turn == 0:  # the warm-up, and the exchanges of the construction
            shared.ranks.sent.clear()
            shared.ranks.calls.clear()
            rows.clear()
    count = options.rounds
    return Measured(
        method,
        alone=statistics.median(r[0] for r in rows),
        shared=statistics.median(r[2] for r in rows),
        speedup=statistics.median(r[0] / r[2] for r in rows),
        cpu_speedup=statistics.median(r[1] / r[3] for r in rows),
        sent={kind: n / count for kind, n in shared.ranks.sent.items()},
        calls={kind: n / count for kind, n in shared.ranks.calls.items()},
        trained=sum(p.numel() for p in shared.trained.values()),
    )


def moetta_bytes(model: nn.Module, rows: int) -> dict[str, int]:
    """What a rank with so many images hands over in a step of MoETTA, from the layers alone."""
    adapter = moetta.adapt(model, "moetta")
    trained = sum(p.numel() for p in adapter.trained.values())
    classes = model.num_classes
    chosen = sum(experts + adapter.config.top_k for experts in adapter.expert_counts().values())
    return {
        "trained": trained,
        "gradients": 4 * (trained + 2),  # the loss and its square travel with them
        "rows": 4 * rows * (classes + chosen),
    }


def empty(name: str) -> nn.Module:
    """A timm model with all weights zero: to count its layers."""
    with torch.device("meta"):
        model = timm.create_model(name)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    return model


def exchange_seconds(
    gpus: int, gradients: float, rows: float, messages: int, link: tuple[float, float]
) -> float:
    """Time of a step on the link: ring all-reduce, two ring all-gathers, messages by a tree."""
    bandwidth, latency = link
    if gpus == 1:
        return 0.0
    reduce = 2 * (gpus - 1) / gpus * gradients / bandwidth + 2 * (gpus - 1) * latency
    gather = (gpus - 1) * (rows / bandwidth + 2 * latency)
    return reduce + gather + messages * math.ceil(math.log2(gpus)) * latency


def scaling(options: Options, gradients: int, row: int, message: float, calls: int) -> Table:
    """Images per second by number of GPUs, for a batch of 64 in all and of 64 each.

    Every exchange also costs what a small one takes on this machine between two processes.
    """
    table = Table(title=f"{options.large}, MoETTA: model of scaling, {options.images_per_second:g} "
                  f"images/s on one GPU (assumed)")  # fmt: skip
    table.add_column("GPUs", justify="right")
    for name in LINKS:
        table.add_column(f"64 in all, {name}", justify="right")
        table.add_column(f"64 each, {name}", justify="right")
    for gpus in GPUS:
        cells = []
        for link in LINKS.values():
            for total in (64, 64 * gpus):
                each = math.ceil(total / gpus)
                software = calls * message if gpus > 1 else 0.0
                spent = exchange_seconds(gpus, gradients, row * each, calls - 3, link) + software
                rate = total / (each / options.images_per_second + spent)
                share = rate / (options.images_per_second * gpus)
                cells.append(f"{rate:,.0f} ({100 * share:.0f} %)")
        table.add_row(str(gpus), *cells)
    return table


def main(options: Options) -> None:
    """Measure, then print."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, folder), 2)
        found = json.loads(Path(folder, "found.json").read_text())
    methods = [Measured(**facts) for facts in found["methods"]]
    large = moetta_bytes(empty(options.large), 64)
    small = moetta_bytes(empty(options.model), even(options.batch, 2)[0])
    for measured in methods:
        if measured.method == "moetta":  # the formula is right where it can be checked
            for kind in ("gradients", "rows"):
                assert measured.sent[kind] == small[kind], (kind, measured.sent, small)
    if options.json:
        print(json.dumps({**found, "large": large, "load": os.getloadavg()}))
        return
    console = Console()
    console.print(f"{options.model}, batches of {options.batch}, {options.rounds} rounds, load "
                  f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    table = Table()
    for name in ("method", "1 rank, s", "2 ranks, s", "speed-up", "by CPU time", "trained"):
        table.add_column(name, justify="right")
    for name in ("gradients B", "rows B", "control B", "exchanges"):
        table.add_column(name, justify="right")
    for m in methods:
        sent = [f"{m.sent.get(kind, 0):,.0f}" for kind in ("gradients", "rows", "control")]
        table.add_row(
            m.method, f"{m.alone:.3f}", f"{m.shared:.3f}", f"{m.speedup:.2f}",
            f"{m.cpu_speedup:.2f}", f"{m.trained:,}", *sent, f"{sum(m.calls.values()):.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"a control message takes {1e6 * found['message']:.0f} us here (gloo, 2 ranks)")
    console.print(
        f"{options.large}, MoETTA: {large['trained']:,} trained numbers; per step a rank "
        f"hands over {large['gradients'] / 1e6:.2f} MB of gradients and, with 64 images, "
        f"{large['rows'] / 1e3:.0f} kB of rows"
    )
    calls = next((sum(m.calls.values()) for m in methods if m.method == "moetta"), 6)
    row = large["rows"] // 64
    console.print(scaling(options, large["gradients"], row, found["message"], round(calls)))


if __name__ == "__main__":
    main(tyro.cli(Options))
