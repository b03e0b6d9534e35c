"""Does the loader keep the model fed? Compares reading with the step of vit_tiny_patch16_224.

    python benchmarks/loader.py
    python benchmarks/loader.py --data FOLDER_WITH_CIFAR10

Photos of 500 x 375 pixels are written to a temporary folder as JPEG and read as the paper's
classical stream is when ImageNet-C is made on the fly: decode, resize and crop, one of the 15
corruptions at severity 5, normalise. The model then takes a Tent step on each batch of 64.

The first table gives CPU time per image by stage, in one process with one thread, so that other
load on the machine matters little. The second gives wall-clock time for 0, 1 and 2 workers, with
and without corruptions: the loader alone, the step alone, and both together, where `wait` is the
share of time for which the step waited for its batch. A worker reads up to two batches ahead, so a
slow loader shows only in longer measurements. All settings take turns for several rounds, and the
median counts. Each process uses one thread.

Here the workers and the step share the cores. A GPU takes its steps faster and leaves the cores to
the workers: if reading an image takes n times as long as its step, use n workers.

With --data only CIFAR-10 is timed: decoding its test images from files, and reading them from the
cache, in a temporary cache folder.
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
from moetta.data import Batch, Domain, Stream, cifar10, corrupted, image_folder, preprocess_for
from moetta.data.named_streams import stream_options

MODEL = "vit_tiny_patch16_224"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=8, help="batches per measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 as test/<class>/*.jpg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.data is not None:
        decoding(args.data, args.rounds)
        return
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


def decoding(folder: Path, rounds: int) -> None:
    """Prints how long the CIFAR-10 test images take when decoded anew and from the cache."""
    spent: dict[str, list[tuple[float, float]]] = {"decoded anew": [], "from the cache": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["MOETTA_CACHE"] = cache
            for times in spent.values():
                wall, cpu = time.perf_counter(), time.process_time()
                count = len(cifar10(folder, partial=True))
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
    print(f"{count:,} test images of CIFAR-10, median of {rounds} rounds, in seconds")
    print(f"  {'':<16}{'wall':>8}{'CPU':>8}")
    for name, times in spent.items():
        print(f"  {name:<16}{median(w for w, _ in times):8.2f}{median(c for _, c in times):8.2f}")


def stages(
    clean: Domain,
    wet: list[Domain],
    adapter: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    rounds: int,
) -> None:
    """Prints CPU milliseconds per image by stage."""
    rows = torch.arange(min(60, len(clean)))
    shown = clean.read(rows)[0]
    mean = torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1)

    def corruptions() -> None:
        # Four images per corruption, as in a mixed batch of 64.
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
    print(f"CPU ms per image, one thread, median of {rounds} rounds")
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
    """Prints images per second of the loader, the step and both, and the share of waiting."""
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
        f"Wall clock on {os.cpu_count()} cores, one thread per process, {batches} batches of "
        f"{len(batch)}, median of {rounds} rounds; images per second"
    )
    print(f"  step alone (its batch is ready){median(step):8.1f}")
    print(f"  {'workers':<9}{'images':<12}{'loader':>8}{'both':>8}{'wait':>8}")
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
        image = np.zeros((375, 500, 3), dtype=np.float32)
        for side in (2, 8, 32, 128):
            coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
            large = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
            image += (large - 128) * (2 / side) ** 0.5
        out = io.BytesIO()
        Image.fromarray((image / 2 + 128).clip(0, 255).astype(np.uint8)).save(
            out, "JPEG", quality=90
        )
        (folder / "photo" / f"{i:04}.jpg").write_bytes(out.getvalue())


if __name__ == "__main__":
    main()
