r"""What the guard is worth: hostile streams, with and without it, for Tent, EATA and MoETTA.

Each row is one run, appended to a file as soon as it is done. A second call runs what is missing
and prints the table; several processes may work on one file. The CIFAR-10 rows need the folder of
its images.

    python benchmarks/guard.py
    python benchmarks/guard.py --data FOLDER_WITH_CIFAR10 --streams length one-class
    python benchmarks/guard.py --data FOLDER_WITH_PHOTOS --weights FILE --models vit-tiny \
        --streams photos photos-10 photos-100 --methods noadapt tent moetta
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

Streams of ViT-Tiny: photos of ImageNet under the 15 corruptions at severity 3.

- photos, photos-N: mixed, at the default learning rate, or at N times that. Not for EATA, which
  needs source images.

Images of noise, constant images and the poison have no right answer: accuracy is that of all
the other images.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import moetta
from guard_streams import Batches, Cifar, Photos, digit_batches, normalised
from moetta import zoo
from moetta.data import embedded

ROOT = Path(__file__).parents[1]
METHODS = ("noadapt", "tent", "eata", "moetta")
DIGITS = ("mixed", "sudden", "lr-10", "lr-20", "batch-1", "noise", "constant", "poison")
CIFAR = ("length", "one-class")


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
    """The folder of CIFAR-10, for its models, or of the photos, for ViT-Tiny."""
    weights: Path | None = None
    """The weights of ViT-Tiny."""
    photos: int = 1920
    """Images in the stream of photos."""
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


def batches(run: Run, images: Cifar | Photos | None) -> Batches:
    """The stream of a run."""
    if isinstance(images, Cifar):
        return images.batches(run.stream, run.model, run.seed)
    if isinstance(images, Photos):
        return images.batches(run.seed)
    name, _, number = run.stream.partition("-")
    size = int(number) if name == "batch" and run.method != "noadapt" else 64
    return digit_batches(name, run.model, size, run.seed)


def same_images(stream: str) -> str:
    """The stream on which noadapt is measured: its answers depend on nothing but the image."""
    if stream.startswith("batch-"):
        return "batch-1"
    if stream.startswith("photos"):
        return "photos"
    return stream if stream in (*CIFAR, "clean", "return", "short") else "mixed"


# --- runs ---------------------------------------------------------------------------------------


def make(run: Run, model: nn.Module, source: Tensor | None, fisher: Path) -> moetta.Adapter:
    """The adapter of a run, at the shipped settings."""
    fields = {} if run.model == "vit-tiny" else zoo.tuned(run.model, run.method)
    name, _, factor = run.stream.partition("-")
    if name in ("lr", "photos") and factor and run.method != "noadapt":
        usual = fields.get("lr") or moetta.adapt(model, run.method).config.to_dict()["lr"]
        fields["lr"] = usual * float(factor)
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


def kind_of(name: str) -> str:
    """Which images a model or a stream is for."""
    if name in CIFAR or name.startswith("cifar"):
        return "cifar"
    return "photos" if name == "vit-tiny" or name.startswith("photos") else "digits"


def wanted(options: Options) -> list[Run]:
    """The runs, in the order of the table."""
    runs = [
        Run(stream, model, method, guarded, options.seed)
        for model in options.models
        for stream in options.streams
        if kind_of(model) == kind_of(stream)
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


def load_images(kind: str, options: Options) -> Cifar | Photos | None:
    """The images of a kind of stream, unless they are embedded."""
    if kind == "digits":
        return None
    if options.data is None or (kind == "photos" and options.weights is None):
        raise SystemExit("these streams need --data, and photos --weights too")
    if kind == "cifar":
        return Cifar(options.data, options.cache)
    assert options.weights is not None
    return Photos(options.data, options.weights, options.photos)


def run_one(run: Run, options: Options, images: Cifar | Photos | None, fisher: Path) -> None:
    """Run, and append the row."""
    model = images.model() if isinstance(images, Photos) else zoo.load(run.model)
    source = None
    if run.method == "eata":
        source = (
            normalised(images.source, run.model)
            if isinstance(images, Cifar)
            else embedded.source_images(2000)
        )
    adapter = make(run, model, source, fisher)
    parts = (run.stream, run.model, run.method, "guarded" if run.guarded else "plain", run.seed)
    record = options.record and options.record / ("_".join(map(str, parts)) + ".npz")
    found = measure(adapter, batches(run, images), record)
    print(run, {k: v for k, v in found.items() if k != "events"}, flush=True)
    append({**asdict(run), **found}, options)


def main(options: Options) -> None:
    """Run what is missing, then print the table."""
    torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = [key(r) for r in read(options)]
    missing = [] if options.only_table else [r for r in wanted(options) if r not in done]
    images = {kind: load_images(kind, options) for kind in {kind_of(r.model) for r in missing}}
    with TemporaryDirectory() as folder:
        for run in missing:
            with claimed(run, options) as ours:
                if ours:
                    fisher = Path(folder) / f"{run.model}.safetensors"
                    run_one(run, options, images[kind_of(run.model)], fisher)
    print(table(read(options)))


if __name__ == "__main__":
    main(tyro.cli(Options))
