"""What the guard is worth: hostile streams, with and without it, for Tent, EATA and MoETTA.

Each row is one run, appended to a file as soon as it is done. A second call runs what is missing
and prints the table; several processes may work on one file. The CIFAR-10 rows need the folder of
its images.

    python benchmarks/guard.py
    python benchmarks/guard.py --data FOLDER_WITH_CIFAR10 --streams length one-class
    python benchmarks/guard.py --only-table

Streams of the digit models: the embedded classical stream, 14,400 images, in batches of 64.

- mixed: as it is. Adaptation helps here; the guard should not interfere.
- sudden: one domain after another.
- lr-N: mixed, at N times the shipped learning rate. lr-20 is an injected collapse.
- batch-N: mixed, the first 3,600 images, N at a time.
- noise, constant: every second block of 16 batches is normal noise, or images of one grey each.
- poison: half of each batch is one image, again and again, that the source model is surely wrong
  about (its most confident error among the first 1,000 images).
- bursts: sorted by class, 144 images of each.
- clean: 3,600 clean images, on which the source model is right nearly always.
- return: clean images, all corrupted ones, the clean images again.
- short: the first 20 batches of mixed.

Streams of the CIFAR-10 models: the 15 corruptions of its test set at severity 5.

- length: all 150,000 images, mixed.
- one-class: the 15,000 images of one class, mixed.

Images of noise, constant images and the poison have no right answer: accuracy is that of all
the other images.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Literal

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
    kinds: tuple[Literal["plain", "guarded"], ...] = ("plain", "guarded")
    """Run only one of these, for example the guarded rows after a change of the guard."""
    seed: int = 42
    data: Path | None = None
    """The folder of CIFAR-10, for its models."""
    cache: Path | None = None
    """A folder that keeps the corrupted CIFAR-10 images (460 MB) from one call to the next."""
    results: Path = ROOT / "benchmarks" / "results" / "guard.jsonl"
    record: Path | None = None
    """A folder for the logits and labels of each run, to replay the detectors on."""
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


@cache
def digits(order: str, seed: int) -> tuple[Tensor, Tensor]:
    """The images and labels of the embedded classical stream, in order."""
    if order == "clean":
        shuffled = torch.randperm(3600, generator=torch.Generator().manual_seed(seed))
        images, labels, _ = embedded.domain("clean", count=3600).read(shuffled)
        return (images.float() / 255 - embedded.MEAN[0]) / embedded.STD[0], labels
    found = list(embedded.stream("classical", order=order, seed=seed))
    return torch.cat([b.images for b in found]), torch.cat([b.labels for b in found])


def split(images: Tensor, labels: Tensor, size: int = 64) -> Batches:
    """In batches."""
    return zip(images.split(size), labels.split(size), strict=True)


def interrupted(junk: Callable[[torch.Generator], Tensor], seed: int) -> Batches:
    """Ordinary traffic in which every second block is junk."""
    generator = torch.Generator().manual_seed(seed)
    for number, (images, labels) in enumerate(split(*digits("mixed", seed))):
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
    images, labels = digits("mixed", seed)
    with torch.no_grad():
        confidence, predicted = zoo.load(model)(images[:1000]).softmax(1).max(1)
    worst = images[torch.where(predicted != labels[:1000], confidence, 0).argmax()]
    for part, right in split(images, labels, 32):
        copies = worst.expand(len(part), -1, -1, -1)
        yield torch.cat((part, copies)), torch.cat((right, torch.full((len(copies),), -1)))


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
    name, _, number = run.stream.partition("-")
    if name in ("noise", "constant"):
        return interrupted(noise if name == "noise" else constant, run.seed)
    if name == "poison":
        return poisoned(run.model, run.seed)
    orders = {"sudden": "continual", "clean": "clean"}
    images, labels = digits(orders.get(name, "mixed"), run.seed)
    if name == "return":
        clean, right = digits("clean", run.seed)
        return split(torch.cat((clean, images, clean)), torch.cat((right, labels, right)))
    if name == "bursts":
        by_class = labels.argsort(stable=True)
        return split(images[by_class], labels[by_class])
    if name == "batch":
        size = int(number) if run.method != "noadapt" else 64
        return split(images[:3600], labels[:3600], size)
    if name == "short":
        return split(images[: 20 * 64], labels[: 20 * 64])
    return split(images, labels)


def same_images(stream: str) -> str:
    """The stream on which noadapt is measured: its answers depend on nothing but the image."""
    if stream.startswith("batch-"):
        return "batch-1"
    return stream if stream in (*CIFAR, "clean", "return", "short") else "mixed"


# --- runs ---------------------------------------------------------------------------------------


def make(run: Run, source: Tensor | None, fisher: Path) -> moetta.Adapter:
    """The adapter of a run, at the shipped settings."""
    fields = zoo.tuned(run.model, run.method)
    if run.stream.startswith("lr-") and run.method != "noadapt":
        fields["lr"] *= float(run.stream.removeprefix("lr-"))
    model = zoo.load(run.model)
    if run.method == "eata":
        adapter = moetta.adapt(
            model, "eata", source=str(fisher) if fisher.exists() else source, **fields
        )
        adapter.save_source(fisher)
    else:
        adapter = moetta.adapt(model, run.method, **fields)
    return moetta.Guard(adapter) if run.guarded else adapter


def measure(adapter: moetta.Adapter, stream: Batches, record: Path | None) -> dict[str, Any]:
    """Accuracy in per cent: whole, and by quarter of the scored images."""
    right: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []
    start, images_seen = time.perf_counter(), 0
    for images, labels in stream:
        logits = adapter(images)
        right.append((logits.argmax(1) == labels)[labels >= 0])
        if record is not None:
            seen.append((logits.half(), labels))
        images_seen += len(images)
    scored = torch.cat(right).double()
    out: dict[str, Any] = {
        "accuracy": round(100 * float(scored.mean()), 3),
        "quarters": [round(100 * float(q.mean()), 2) for q in scored.tensor_split(4)],
        "batches": len(right),
        "scored": len(scored),
        "seconds": round(time.perf_counter() - start, 1),
        "forwards": round(adapter.totals.forwards / images_seen, 3),
        "lr": getattr(adapter.config, "lr", None),
    }
    if isinstance(adapter, moetta.Guard):
        out["counts"] = dict(adapter.counts)
        out["events"] = [asdict(e) for e in adapter.events]
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        answers, truth = (torch.cat(parts).numpy() for parts in zip(*seen, strict=True))
        np.savez_compressed(record, logits=answers, labels=truth)
    return out


def wanted(options: Options) -> list[Run]:
    """The runs, in the order of the table."""
    runs = [
        Run(stream, model, method, guarded, options.seed)
        for model in options.models
        for stream in options.streams
        if model.startswith("cifar") == (stream in CIFAR)
        for method in options.methods
        for guarded in ((False,) if method == "noadapt" else (False, True))
        if ("guarded" if guarded else "plain") in options.kinds
    ]
    shared = (
        replace(r, stream=same_images(r.stream)) if r.method == "noadapt" else r for r in runs
    )
    return list(dict.fromkeys(shared))


def read(options: Options) -> list[dict[str, Any]]:
    """The rows on file."""
    if not options.results.exists():
        return []
    return [json.loads(line) for line in options.results.read_text().splitlines()]


def key(row: dict[str, Any]) -> Run:
    """The run that a row is of."""
    return Run(**{name: row[name] for name in Run.__dataclass_fields__})


@contextmanager
def claimed(run: Run, options: Options) -> Iterator[bool]:
    """Whether the run is ours: neither done nor being done by another process."""
    name = sha256(f"{options.results.resolve()} {run}".encode()).hexdigest()[:24]
    with (Path(gettempdir()) / f"moetta-guard-{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of if the process ends
        except BlockingIOError:
            yield False
            return
        yield run not in map(key, read(options))


def append(row: dict[str, Any], options: Options) -> None:
    """Add a row to the file; other processes may be doing the same."""
    with options.results.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; a promise that is broken is in bold."""
    lines = [
        "| stream | model | seed | method | lr | noadapt | plain | guarded | trouble "
        "| forwards | guarded |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    by = {key(r): r for r in rows}
    for run, row in by.items():
        plain = by.get(replace(run, guarded=False))
        base = by.get(replace(run, stream=same_images(run.stream), method="noadapt", guarded=False))
        if not run.guarded or plain is None or base is None or plain["lr"] != row["lr"]:
            continue
        zero, without, kept = (r["accuracy"] for r in (base, plain, row))
        helps = without > zero
        good = kept >= (zero + 0.8 * (without - zero) if helps else zero - 0.5)
        shown = f"{kept:.2f}" if good else f"**{kept:.2f}**"
        trouble = sum(row["counts"].get(k, 0) for k in ("rollback", "reset"))
        lines.append(
            f"| {run.stream} | {run.model} | {run.seed} | {run.method} | {row['lr']:g} "
            f"| {zero:.2f} | {without:.2f} | {shown} | {trouble} "
            f"| {plain['forwards']:.2f} | {row['forwards']:.2f} |"
        )
    return "\n".join(lines)


def run_one(run: Run, options: Options, cifar: Cifar | None, fisher: Path) -> None:
    """Run, and append the row."""
    source = None
    if run.method == "eata":
        source = (
            embedded.source_images(2000) if cifar is None else normalised(cifar.source, run.model)
        )
    adapter = make(run, source, fisher)
    parts = (run.stream, run.model, run.method, "guarded" if run.guarded else "plain", run.seed)
    record = options.record and options.record / ("_".join(map(str, parts)) + ".npz")
    found = measure(adapter, batches(run, cifar), record)
    print(run, {k: v for k, v in found.items() if k != "events"}, flush=True)
    append({**asdict(run), **found}, options)


def main(options: Options) -> None:
    """Run what is missing, then print the table."""
    torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = [key(r) for r in read(options)]
    missing = [] if options.only_table else [r for r in wanted(options) if r not in done]
    cifar = Cifar(options) if any(r.stream in CIFAR for r in missing) else None
    with TemporaryDirectory() as folder:
        for run in missing:
            with claimed(run, options) as ours:
                if ours:
                    images = cifar if run.stream in CIFAR else None
                    run_one(run, options, images, Path(folder) / f"{run.model}.safetensors")
    print(table(read(options)))


if __name__ == "__main__":
    main(tyro.cli(Options))
