"""Runs one cell, from its last checkpoint to its results."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.bench import memory, run_folder
from moetta.bench.cell import BASELINE, Cell
from moetta.bench.finished import find_finished, is_finished
from moetta.bench.lock import locked
from moetta.bench.meter import Meter, Scored
from moetta.bench.progress import Progress
from moetta.bench.protocol import Prepared, prepare
from moetta.core.adapter import Adapter
from moetta.data import Batch, logit_mask
from moetta.files import read_safetensors, write_atomically, write_json
from moetta.results.runs import SCHEMA

BASELINE_BATCHES = 64
"""On how many batches of a long stream the source model is run for comparison."""
SIMILARITY_POINTS = 40
"""How often along a stream the experts are compared with each other."""
log = logging.getLogger("moetta")


def run_cell(
    cell: Cell,
    root: Path,
    checkpoint_seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
    patience: float | None = None,
) -> Generator[Progress, None, Path]:
    """Run a cell, or what is left of it; yields after every batch and returns its folder.

    A finished cell is not run again. Closing the generator writes a checkpoint. If another process
    keeps running the same cell, this raises an error: two writers would mix their checkpoints.

    Args:
        cell: what to run.
        root: folder of the results.
        checkpoint_seconds: how many seconds of work a killed process may lose.
        stop: asked while source images are read; after the first batch, close the generator.
        patience: how many seconds to wait for another process that runs the same cell.

    Raises:
        Stopped: ``stop`` said yes.
    """
    if cell.threads:
        torch.set_num_threads(cell.threads)
    found = find_finished(cell, root)
    if found is not None and found.certain:
        return found.folder
    try:
        prepared = prepare(cell)
    except (ValueError, OSError) as error:
        if found is None:
            raise
        reason = str(error).splitlines()[0]
        log.warning("%s is shown as it was run; it cannot be checked: %s", found.folder, reason)
        return found.folder
    folder = root / prepared.key
    if not is_finished(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, patience, stop):
            if not is_finished(folder):  # by a process that held the lock before
                yield from _Session(prepared, folder, stop).run(checkpoint_seconds)
    return folder


class _Session:
    """One process's part of a run."""

    def __init__(self, prepared: Prepared, folder: Path, stop: Callable[[], bool]) -> None:
        self.prepared, self.folder = prepared, folder
        self.checkpoint = folder / "checkpoint"
        self.adapter = prepared.adapter(stop)
        self.meter = self._new_meter()
        self.peak = 0
        self.skipped: list[dict[str, Any]] = []  # images that earlier sessions could not read
        self.next = 0  # a stream may leave batches out, so this is not the meter's row count
        self._restore()
        self.stream = prepared.stream.starting_at(self.next)
        if not run_folder.has_card(folder):
            write_json(folder / "card.json", prepared.card())
        self.every = max(1, self.stream.batches // BASELINE_BATCHES)
        self.mask: Tensor | None = None

    def run(self, checkpoint_seconds: float) -> Generator[Progress, None, None]:
        device = self.prepared.cell.device
        memory.reset_peak(device)
        resumed, begun, saved = self.next, time.perf_counter(), time.perf_counter()
        before = int(self.meter.counts[..., 0].sum())
        try:
            for batch in self.stream:
                self.meter.add(self._score(batch))
                self.next = batch.number + 1
                self._compare_experts(batch.number)
                if time.perf_counter() - saved >= checkpoint_seconds:
                    self._save()
                    saved = time.perf_counter()
                yield self._progress(before, begun, resumed)
        except GeneratorExit:
            self._save()
            raise
        self.peak = max(self.peak, memory.peak(device))
        run_folder.write_run(
            self.folder, self.prepared, self.adapter, self.meter, self.peak, self._unread()
        )
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def _new_meter(self) -> Meter:
        stream = self.prepared.stream
        experts = max(self.adapter.expert_counts().values(), default=0)
        return Meter(stream.domain_names, stream.batches, experts)

    def _unread(self) -> list[dict[str, Any]]:
        return self.skipped + [vars(unread) for unread in self.stream.skipped]

    def _score(self, batch: Batch) -> Scored:
        cell = self.prepared.cell
        batch_here = batch.to(cell.device)
        logits, seconds = _timed(self.adapter, batch_here.images)
        if int(batch.labels.max()) >= logits.shape[1]:
            raise ValueError(
                f"the stream has labels up to {int(batch.labels.max())}, but {cell.model} knows "
                f"only {logits.shape[1]} classes: choose a model trained on these classes, or "
                "number the labels as it does"
            )
        assert self.adapter.last is not None
        baseline, baseline_seconds = None, float("nan")
        if cell.method == BASELINE:
            baseline, baseline_seconds = logits, seconds
        elif batch.number % self.every == 0:
            baseline, baseline_seconds = _timed(self.prepared.baseline, batch_here.images)
        return Scored(
            batch.number,
            batch.domains,
            batch.labels,
            self._masked(logits, batch),
            self.adapter.last,
            seconds,
            None if baseline is None else self._masked(baseline, batch),
            baseline_seconds,
        )

    def _masked(self, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits.cpu()
        if not self.prepared.stream.mask:
            return logits
        if self.mask is None:
            self.mask = logit_mask(self.prepared.stream.domains, logits.shape[1])
        return logits.masked_fill(~self.mask[batch.domains], float("-inf"))

    def _compare_experts(self, step: int) -> None:
        steps = self.meter.batches
        interval = max(1, steps // SIMILARITY_POINTS)
        if step % interval == 0 or step == steps - 1:
            self.meter.measure_similarity(step, self.adapter.experts())

    def _progress(self, before: int, begun: float, resumed: int) -> Progress:
        meter, stream = self.meter, self.prepared.stream
        samples, correct = meter.counts.sum((0, 1)).tolist()
        both, ours, theirs = meter.paired.sum((0, 1)).tolist()
        rate = (samples - before) / max(time.perf_counter() - begun, 1e-9)
        return Progress(
            step=self.next,
            steps=stream.batches,
            samples=samples,
            samples_total=stream.samples,
            accuracy=correct / samples,
            gain=(ours - theirs) / both if both else None,
            rate=rate,
            eta=(stream.samples - samples) / rate,
            resumed=resumed,
        )

    def _save(self) -> None:
        """Write a checkpoint: new files first, then progress.json, which makes them count."""
        self.checkpoint.mkdir(exist_ok=True)
        self.peak = max(self.peak, memory.peak(self.prepared.cell.device))
        names = {kind: f"{kind}-{self.next}.safetensors" for kind in ("adapter", "meter")}
        self.adapter.save(self.checkpoint / names["adapter"])
        tensors = {name: t.contiguous() for name, t in self.meter.tensors().items()}
        write_atomically(self.checkpoint / names["meter"], to_bytes(tensors))
        progress = {"schema": SCHEMA, "step": self.next, "peak": self.peak, **names}
        progress["skipped"] = self._unread()
        write_json(self.checkpoint / "progress.json", progress)
        for old in self.checkpoint.iterdir():
            if old.name not in (*names.values(), "progress.json"):
                old.unlink(missing_ok=True)

    def _restore(self) -> None:
        """Resume from the last checkpoint, if there is one; start anew if it is damaged."""
        try:
            progress: dict[str, Any] = json.loads((self.checkpoint / "progress.json").read_text())
            tensors, _ = read_safetensors(self.checkpoint / progress["meter"])
            self.adapter.load(self.checkpoint / progress["adapter"])
            self.meter.restore(tensors)
            self.next, self.peak = progress["step"], progress["peak"]
            self.skipped = progress["skipped"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError) as error:
            self.adapter.reset()
            self.meter = self._new_meter()
            log.warning("%s: %s; starting this run anew", self.checkpoint, error)


def _timed(adapter: Adapter, images: Tensor) -> tuple[Tensor, float]:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    begun = time.perf_counter()
    logits = adapter(images)
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return logits, time.perf_counter() - begun
