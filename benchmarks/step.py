"""What a step of each method costs: the paper's table 2 on any timm model.

All methods take turns in one process, so that the ratios hold on a busy machine: each round runs
every method once, in a new order, and the ratios are medians over the rounds. With one thread, CPU
time is measured, which other processes disturb less. Methods that refuse the model are left out.

    python benchmarks/step.py --model vit_tiny_patch16_224 --batch 32 --threads 2
    python benchmarks/step.py --threads 1 --rounds 15 --methods neo lame gain
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import moetta
from moetta.nn.moe import with_experts
from moetta.nn.norms import describe


@dataclass(frozen=True)
class Options:
    """Cost of a step, relative to noadapt and to Tent."""

    model: str = "vit_tiny_patch16_224"
    """A timm model; it gets random weights, since only the cost matters."""
    batch: int = 32
    """Images per batch."""
    threads: int = 2
    """CPU threads."""
    rounds: int = 9
    """Rounds; each runs every method once."""
    methods: tuple[str, ...] = ()
    """Methods; by default all. noadapt and tent are always included."""
    compile: bool = False
    """Pass the model through torch.compile first."""
    device: str = "cpu"
    """Where to run."""
    frozen: str = ""
    """Also run MoETTA with these norm layers frozen, such as "0-5"."""
    profile: str = ""
    """Instead of the table, print where one step of this method spends its time."""
    layer: bool = False
    """Instead of the table, time a layer with experts and a plain LayerNorm, [batch, 197, 192]."""


def build_model(options: Options) -> torch.nn.Module:
    """The model, with a head confident enough for samples to pass the entropy filters."""
    torch.manual_seed(0)
    model = timm.create_model(options.model).eval().to(options.device)
    with torch.no_grad():
        head = model.get_classifier()
        head.weight.normal_(0, 1.0)
    return torch.compile(model) if options.compile else model


def batch_of(options: Options, model: torch.nn.Module, seed: int) -> Tensor:
    """Images that differ from each other: coarse random fields."""
    size = timm.data.resolve_model_data_config(getattr(model, "_orig_mod", model))["input_size"][-1]
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(options.batch, 3, 7, 7, generator=generator)
    return torch.nn.functional.interpolate(coarse, size, mode="bicubic").to(options.device)


class SavedBytes:
    """Counts the activations that autograd keeps for the backward pass."""

    def __init__(self, model: torch.nn.Module, *known: Tensor) -> None:
        tensors = [*model.parameters(), *model.buffers(), *known]
        self.known = {t.untyped_storage().data_ptr() for t in tensors}
        self.seen: dict[int, tuple[int, Tensor]] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor's memory once, and keep it so that its address is not reused."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.seen[storage.data_ptr()] = (storage.nbytes(), tensor.detach())
        return tensor

    @property
    def total(self) -> int:
        """Bytes held."""
        return sum(size for size, _ in self.seen.values())


def saved_by_forward(adapter: moetta.Adapter, images: Tensor) -> int:
    """Bytes that the adapter's differentiated forward pass keeps."""
    if not adapter.trained:
        return 0
    counter = SavedBytes(adapter.network, images)
    with counter.hooks, torch.enable_grad():
        adapter.model(images)
    return counter.total


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(options.threads)
    if options.layer:
        return layer(options)
    model = build_model(options)
    images = [batch_of(options, model, seed) for seed in range(3)]
    if options.profile:
        return profile(options.profile, model, images)
    chosen = dict.fromkeys(("noadapt", "tent", *(options.methods or moetta.list_methods())))
    adapters = {}
    for name in chosen:
        try:
            source = torch.cat(images)[: 2 * options.batch]
            adapters[name] = moetta.adapt(model, name, source=source)
        except ValueError as refusal:
            print(f"{name}: {refusal}")
    if options.frozen:
        adapters["moetta frozen"] = moetta.adapt(model, "moetta", frozen=options.frozen)
    times: dict[str, list[float]] = {name: [] for name in adapters}
    shuffled, clock = list(adapters), clock_for(options)
    for turn in range(options.rounds + 1):
        random.Random(turn).shuffle(shuffled)
        for name in shuffled:
            _wait(options.device)
            start = clock()
            adapters[name](images[turn % len(images)])
            _wait(options.device)
            if turn:  # the first round warms up
                times[name].append(clock() - start)
    saved = {name: saved_by_forward(adapter, images[0]) for name, adapter in adapters.items()}
    show(options, adapters, times, saved)


def layer(options: Options, tokens: int = 197, width: int = 192, experts: int = 9) -> None:
    """Print the median time of one norm layer's forward and backward pass, calls interleaved."""
    torch.manual_seed(0)
    shape = (options.batch, tokens, width)
    # Several inputs in turn, since in a model a layer's input is not in the cache either.
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(8)]
    pull, pull_p = torch.randn(shape), torch.randn(options.batch, experts)
    native = torch.nn.LayerNorm(width, eps=1e-6)
    described = describe("norm", torch.nn.LayerNorm(width, eps=1e-6))
    assert described is not None
    ours = with_experts(described, experts)
    ours.weight.requires_grad_(False)
    ours.bias.requires_grad_(False)
    trained = [p for p in ours.parameters() if p.requires_grad]
    times: dict[str, list[tuple[float, float]]] = {"native": [], "with experts": []}
    clock = clock_for(options)
    for turn in range(120):
        x = inputs[turn % len(inputs)]
        for name in random.Random(turn).sample(list(times), 2):
            start = clock()
            if name == "native":
                outputs, pulls, wanted = [native(x)], [pull], [x, *native.parameters()]
            else:
                y = ours(x)
                assert ours.last is not None
                outputs, pulls = [y, ours.last.probabilities], [pull, pull_p]
                wanted = [x, *trained]
            middle = clock()
            torch.autograd.grad(outputs, wanted, pulls)
            times[name].append((middle - start, clock() - middle))
    for name, pairs in times.items():
        forward, backward = (statistics.median(column[10:]) for column in zip(*pairs, strict=True))
        print(f"{name:12}  forward {forward * 1e3:.2f} ms, backward {backward * 1e3:.2f} ms")


def profile(name: str, model: torch.nn.Module, images: list[Tensor]) -> None:
    """Print the operators of one step by the time spent in each, without its children."""
    adapter = moetta.adapt(model, name, source=torch.cat(images))
    adapter(images[0])
    with torch.profiler.profile() as record:
        adapter(images[1])
    spent = sorted(record.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in spent)
    for event in spent[:16]:
        share = event.self_cpu_time_total / total
        print(
            f"{share:6.1%} {event.self_cpu_time_total / 1e3:8.1f} ms x{event.count:<4} {event.key}"
        )


def show(
    options: Options,
    adapters: dict[str, moetta.Adapter],
    times: dict[str, list[float]],
    saved: dict[str, int],
) -> None:
    """Print the table."""
    table = Table(title=f"{options.model}, batch {options.batch}, {options.threads} threads")
    columns = "method|time / noadapt|time / tent|saved MB|saved / tent|activated|forward|backward"
    for column in columns.split("|"):
        table.add_column(column, justify="left" if column == "method" else "right")

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

    for name, adapter in adapters.items():
        totals = adapter.totals
        table.add_row(
            name,
            f"{ratio(name, 'noadapt'):.3f}",
            f"{ratio(name, 'tent'):.3f}",
            f"{saved[name] / 1e6:.1f}",
            f"{saved[name] / saved['tent']:.3f}",
            f"{adapter.activated_parameters:,}",
            f"{totals.forwards / totals.samples:.0%}",
            f"{totals.backwards / totals.samples:.0%}",
        )
    Console(width=110).print(table)
    fastest = min(times["noadapt"])
    print(f"noadapt: {fastest * 1e3:.0f} ms per batch at best, {options.rounds} rounds")


def clock_for(options: Options) -> Callable[[], float]:
    """CPU time where one thread does all the work, otherwise time."""
    alone = options.threads == 1 and options.device == "cpu"
    return time.process_time if alone else time.perf_counter


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
