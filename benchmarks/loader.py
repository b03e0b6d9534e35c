"""Does the loader keep the model fed? Reading against the step of an adapted vit_tiny_patch16_224.

    python benchmarks/loader.py

Photos of 500 x 375 pixels are written to a temporary folder as JPEG, and read as the paper's
classical stream is when ImageNet-C is made on the fly: decode, resize and crop, one of the 15
corruptions at severity 5, normalise; the model then takes a Tent step on each batch of 64.

Two tables. The first is CPU time for an image by stage, in one process with one thread, which other
load on the machine disturbs little. The second is wall-clock time, for 0, 1 and 2 workers, with and
without the corruptions: the loader alone, the step alone, and both together, where `wait` is the
share of the time for which the step waited for its batch. A worker reads up to two batches ahead,
so a measurement must be longer than that for a slow loader to show. All settings take turns,
several rounds, and the median counts. Each process computes with one thread.

Here the workers and the step share the cores. A GPU takes its steps faster and leaves the cores to
the workers: it needs as many of them as the reading of an image takes times as long as its step.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import timm
import torch
from PIL import Image

import moetta
from moetta.data import Batch, Domain, Stream, corrupted, image_folder, preprocess_for
from moetta.data.named_streams import stream_options

MODEL = "vit_tiny_patch16_224"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=8, help="batches in each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pre = preprocess_for(MODEL, "paper")
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), args.batches * args.batch_size)
        clean = image_folder(folder, pre, name="clean")
        wet = corrupted(clean)

        def make(domains: list[Domain], workers: int) -> Stream:
            return Stream(
                domains,
                limit=args.batches * args.batch_size,
                batch_size=args.batch_size,
                workers=workers,
                **stream_options(pre),
            )

        adapter = moetta.adapt(timm.create_model(MODEL), "tent")
        batch = next(iter(make([clean], 0)))
        adapter(batch.images)  # the first step allocates
        stages(clean, wet, adapter, batch, args.rounds)
        together(make, [clean], wet, adapter, batch, args.rounds, args.batches)


def stages(
    clean: Domain,
    wet: list[Domain],
    adapter: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    rounds: int,
) -> None:
    """Prints CPU milliseconds for an image by stage."""
    rows = torch.arange(min(60, len(clean)))
    shown = clean.read(rows)[0]
    mean = torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1)

    def corruptions() -> None:
        # Four images for each corruption, as in a mixed batch of 64.
        for domain, part in zip(wet, rows.tensor_split(len(wet)), strict=True):
            Domain("d", shown, clean.labels[rows], corruption=domain.corruption).read(part)

    work: dict[str, tuple[Callable[[], object], int]] = {
        "decode, resize, crop": (lambda: clean.read(rows), len(rows)),
        "corrupt (15, mixed)": (corruptions, len(rows)),
        "normalise": (lambda: shown.float().div_(255).sub_(mean).div_(mean), len(rows)),
        "Tent step": (lambda: adapter(batch.images), len(batch)),
    }
    spent: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, (job, images) in work.items():
            start = time.process_time()
            job()
            spent[name].append((time.process_time() - start) / images * 1e3)
    print(f"CPU ms for an image, one thread, median of {rounds} rounds")
    for name, values in spent.items():
        print(f"  {name:<22}{median(values):8.2f}")
    reading = sum(median(v) for k, v in spent.items() if k != "Tent step")
    print(f"  reading / step        {reading / median(spent['Tent step']):8.2f}\n")


def together(
    make: Callable[[list[Domain], int], Stream],
    clean: list[Domain],
    wet: list[Domain],
    adapter: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    rounds: int,
    batches: int,
) -> None:
    """Prints images a second of the loader, of the step and of both, and how long it waits."""
    settings = [
        (workers, label, domains)
        for workers in (0, 1, 2)
        for label, domains in (("clean", clean), ("on the fly", wet))
    ]
    alone: dict[tuple[int, str], list[float]] = {(w, x): [] for w, x, _ in settings}
    both: dict[tuple[int, str], list[tuple[float, float]]] = {(w, x): [] for w, x, _ in settings}
    step: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(batches):
            adapter(batch.images)
        step.append(batches * len(batch) / (time.perf_counter() - start))
        for workers, label, domains in settings:
            images, seconds, _ = drive(iter(make(domains, workers)), None)
            alone[workers, label].append(images / seconds)
            images, seconds, waited = drive(iter(make(domains, workers)), adapter)
            both[workers, label].append((images / seconds, waited / seconds))
    print(
        f"Wall clock on {os.cpu_count()} cores, one thread a process, {batches} batches of "
        f"{len(batch)}, median of {rounds} rounds; images a second"
    )
    print(f"  step alone (its batch is ready){median(step):8.1f}")
    print(f"  {'workers':<9}{'pictures':<12}{'loader':>8}{'both':>8}{'wait':>8}")
    for workers, label, _ in settings:
        speed = median(s for s, _ in both[workers, label])
        wait = median(w for _, w in both[workers, label])
        loader = median(alone[workers, label])
        print(f"  {workers:<9}{label:<12}{loader:8.1f}{speed:8.1f}{wait:8.1%}")


def drive(
    batches: Iterator[Batch], step: Callable[[torch.Tensor], torch.Tensor] | None
) -> tuple[int, float, float]:
    """Images, seconds, and seconds spent waiting, from the second batch on.

    The first batch is left out, as it includes the start of the workers.
    """
    first = next(batches)
    if step is not None:
        step(first.images)
    images, waited = 0, 0.0
    start = before = time.perf_counter()
    for batch in batches:
        waited += time.perf_counter() - before
        images += len(batch)
        if step is not None:
            step(batch.images)
        before = time.perf_counter()
    return images, time.perf_counter() - start, waited


def write_photos(folder: Path, count: int) -> None:
    """Writes JPEGs with detail at every scale, as photos have, so that decoding takes as long."""
    rng = np.random.default_rng(0)
    (folder / "photo").mkdir()
    for i in range(count):
        picture = np.zeros((375, 500, 3), dtype=np.float32)
        for side in (2, 8, 32, 128):
            coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
            large = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
            picture += (large - 128) * (2 / side) ** 0.5
        out = io.BytesIO()
        Image.fromarray((picture / 2 + 128).clip(0, 255).astype(np.uint8)).save(
            out, "JPEG", quality=90
        )
        (folder / "photo" / f"{i:04}.jpg").write_bytes(out.getvalue())


if __name__ == "__main__":
    main()
