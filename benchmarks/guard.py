"""What the guard is worth: hostile streams, with and without it, for Tent, EATA and MoETTA.

Each row is one run, appended to a file as soon as it is done; a second call runs what is missing
and prints the table. The CIFAR-10 rows need the folder of its images.

    python benchmarks/guard.py
    python benchmarks/guard.py --data FOLDER_WITH_CIFAR10 --streams length one-class
    python benchmarks/guard.py --only-table

Streams of the digit models: the embedded classical stream, 14,400 images, in batches of 64.

- mixed: as it is. Adaptation helps here; the guard should not interfere.
- sudden: one domain after another.
- lr-10: mixed, at ten times the shipped learning rate.
- lr-20: mixed, at twenty times that rate: an injected collapse.
- batch-1: mixed, the first 3,600 images one by one.
- noise, constant: every second block of 16 batches is normal noise, or images of one grey each.
- poison: half of each batch is one image, again and again, that the source model is surely wrong
  about (its most confident error among the first 1,000 images).

Streams of the CIFAR-10 models: the 15 corruptions of its test set at severity 5.

- length: all 150,000 images, mixed.
- one-class: the 15,000 images of one class, mixed.

Images of noise, constant images and the poison have no right answer: accuracy is that of all
the other images.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

import moetta
from moetta import zoo
from moetta.data import cifar10, corrupted, embedded
from moetta.data.corruptions import CLASSICAL

ROOT = Path(__file__).parents[1]
METHODS = ("noadapt", "tent", "eata", "moetta")
DIGITS = ("mixed", "sudden", "lr-10", "lr-20", "batch-1", "noise", "constant", "poison")
CIFAR = ("length", "one-class")
BLOCK = 16  # batches

Batches = Iterator[tuple[Tensor, Tensor]]  # images, labels; label -1 is not scored


@dataclass(frozen=True)
class Options:
    """What is run."""

    streams: tuple[str, ...] = DIGITS
    models: tuple[str, ...] = ("digits-vit", "digits-convnext", "cifar-vit", "cifar-convnext")
    methods: tuple[str, ...] = METHODS
    seed: int = 42
    data: Path | None = None
    """The folder of CIFAR-10, for its models."""
    cache: Path | None = None
    """A folder that keeps the corrupted CIFAR-10 images (460 MB) from one call to the next."""
    results: Path = ROOT / "benchmarks" / "results" / "guard.jsonl"
    only_table: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Run:
    """One row."""

    stream: str
    model: str
    method: str
    guarded: bool
    seed: int


# --- streams ------------------------------------------------------------------------------------


def digits(order: str, seed: int, batch: int = 64, limit: int | None = None) -> Batches:
    """The embedded classical stream."""
    for b in embedded.stream("classical", order=order, seed=seed, batch_size=batch, limit=limit):
        yield b.images, b.labels


def interrupted(junk: Callable[[torch.Generator], Tensor], seed: int) -> Batches:
    """Ordinary traffic in which every second block is junk."""
    generator = torch.Generator().manual_seed(seed)
    for number, (images, labels) in enumerate(digits("mixed", seed)):
        if number % BLOCK == 0 and number:
            for _ in range(BLOCK):
                yield junk(generator), torch.full((64,), -1)
        yield images, labels


def noise(generator: torch.Generator) -> Tensor:
    """Normal noise."""
    return torch.randn(64, 3, 32, 32, generator=generator)


def constant(generator: torch.Generator) -> Tensor:
    """Images of one grey each."""
    return torch.randn(64, 1, 1, 1, generator=generator).expand(64, 3, 32, 32).clone()


def poisoned(model: str, seed: int) -> Batches:
    """Half of each batch is the source model's most confident error."""
    first = list(digits("mixed", seed, limit=1000))
    images, labels = (torch.cat(parts) for parts in zip(*first, strict=True))
    with torch.no_grad():
        confidence, predicted = zoo.load(model)(images).softmax(1).max(1)
    worst = images[torch.where(predicted != labels, confidence, 0).argmax()]
    for images, labels in digits("mixed", seed, batch=32):
        copies = worst.expand(len(images), -1, -1, -1)
        yield torch.cat((images, copies)), torch.cat((labels, torch.full((len(copies),), -1)))


class Cifar:
    """The corrupted test images, made once."""

    def __init__(self, options: Options) -> None:
        if options.data is None:
            raise SystemExit("the streams length and one-class need --data, the folder of CIFAR-10")
        clean = cifar10(options.data, "test")
        file = None if options.cache is None else options.cache / "cifar10-c.npy"
        if file is not None and file.exists():
            self.images = np.load(file, mmap_mode="r")
        else:
            rows = torch.arange(len(clean)).split(1000)
            parts = [d.read(part)[0] for d in corrupted(clean, CLASSICAL) for part in rows]
            self.images = torch.cat(parts).numpy()
            if file is not None:
                np.save(file, self.images)
        self.labels = clean.labels.repeat(len(CLASSICAL))
        train = cifar10(options.data, "train")
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:2000]
        self.source = train.read(chosen)[0]

    def batches(self, stream: str, model: str, seed: int) -> Batches:
        """The whole, or one class of it (by the seed), shuffled."""
        index = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        if stream == "one-class":
            index = index[self.labels[index] == seed % 10]
        for part in index.split(64):
            images = torch.from_numpy(np.ascontiguousarray(self.images[part.numpy()]))
            yield normalised(images, model), self.labels[part]


def normalised(images: Tensor, model: str) -> Tensor:
    """As the model expects them."""
    recipe = zoo.recipe(model)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
    return (images.float() / 255 - mean) / std


def batches(run: Run, cifar: Cifar | None) -> Batches:
    """The stream of a run."""
    if cifar is not None:
        return cifar.batches(run.stream, run.model, run.seed)
    if run.stream == "sudden":
        return digits("continual", run.seed)
    if run.stream == "batch-1":
        return digits("mixed", run.seed, batch=1, limit=3600)
    if run.stream in ("noise", "constant"):
        return interrupted(noise if run.stream == "noise" else constant, run.seed)
    if run.stream == "poison":
        return poisoned(run.model, run.seed)
    return digits("mixed", run.seed)


# --- runs ---------------------------------------------------------------------------------------


def make(run: Run, source: Tensor | None, fisher: Path) -> moetta.Adapter:
    """The adapter of a run, at the shipped settings."""
    fields = zoo.tuned(run.model, run.method)
    if run.stream.startswith("lr-") and run.method != "noadapt":
        fields["lr"] *= int(run.stream.removeprefix("lr-"))
    model = zoo.load(run.model)
    if run.method == "eata":
        adapter = moetta.adapt(
            model, "eata", source=str(fisher) if fisher.exists() else source, **fields
        )
        adapter.save_source(fisher)
    else:
        adapter = moetta.adapt(model, run.method, **fields)
    return moetta.Guard(adapter) if run.guarded else adapter


def measure(adapter: moetta.Adapter, stream: Batches) -> dict[str, Any]:
    """Accuracy in per cent: whole, and by quarter of the scored images."""
    right: list[Tensor] = []
    start, images_seen = time.perf_counter(), 0
    for images, labels in stream:
        predicted = adapter(images).argmax(1)
        right.append((predicted == labels)[labels >= 0])
        images_seen += len(images)
    scored = torch.cat(right).double()
    out: dict[str, Any] = {
        "accuracy": round(100 * float(scored.mean()), 3),
        "quarters": [round(100 * float(q.mean()), 2) for q in scored.tensor_split(4)],
        "batches": len(right),
        "scored": len(scored),
        "seconds": round(time.perf_counter() - start, 1),
        "forwards": round(adapter.totals.forwards / images_seen, 3),
    }
    if isinstance(adapter, moetta.Guard):
        out["counts"] = dict(adapter.counts)
        out["events"] = [asdict(e) for e in adapter.events]
    return out


def wanted(options: Options) -> list[Run]:
    """The runs, in the order of the table."""
    return [
        Run(stream, model, method, guarded, options.seed)
        for stream in options.streams
        for model in options.models
        if model.startswith("cifar") == (stream in CIFAR)
        for method in options.methods
        for guarded in ((False,) if method == "noadapt" else (False, True))
    ]


def read(options: Options) -> list[dict[str, Any]]:
    """The rows on file."""
    if not options.results.exists():
        return []
    return [json.loads(line) for line in options.results.read_text().splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; a promise that is broken is in bold."""
    lines = [
        "| stream | model | method | noadapt | plain | guarded | trouble | forwards | guarded |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    by = {(r["stream"], r["model"], r["seed"], r["method"], r["guarded"]): r for r in rows}
    for stream, model, seed, method, guarded in by:
        plain = by.get((stream, model, seed, method, False))
        base = by.get((stream, model, seed, "noadapt", False))
        if not guarded or plain is None or base is None:
            continue
        row = by[stream, model, seed, method, True]
        zero, without, kept = (r["accuracy"] for r in (base, plain, row))
        helps = without > zero
        good = kept >= (zero + 0.8 * (without - zero) if helps else zero - 0.5)
        shown = f"{kept:.2f}" if good else f"**{kept:.2f}**"
        trouble = sum(row["counts"].get(k, 0) for k in ("rollback", "reset"))
        lines.append(
            f"| {stream} | {model} | {method} | {zero:.2f} | {without:.2f} | {shown} | {trouble} "
            f"| {plain['forwards']:.2f} | {row['forwards']:.2f} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    """Run what is missing, then print the table."""
    torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = [{k: r[k] for k in asdict(Run("", "", "", False, 0))} for r in read(options)]
    missing = [] if options.only_table else [r for r in wanted(options) if asdict(r) not in done]
    cifar = Cifar(options) if any(r.stream in CIFAR for r in missing) else None
    with TemporaryDirectory() as folder:
        for run in missing:
            source = None
            if run.method == "eata":
                images = cifar.source if cifar and run.stream in CIFAR else None
                source = (
                    embedded.source_images(2000)
                    if images is None
                    else normalised(images, run.model)
                )
            adapter = make(run, source, Path(folder) / f"{run.model}.safetensors")
            found = measure(adapter, batches(run, cifar if run.stream in CIFAR else None))
            print(run, {k: v for k, v in found.items() if k != "events"}, flush=True)
            with options.results.open("a") as file:
                file.write(json.dumps({**asdict(run), **found}) + "\n")
    print(table(read(options)))


if __name__ == "__main__":
    main(tyro.cli(Options))
