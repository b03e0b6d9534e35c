"""Runs one cell, from its last checkpoint to its results."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.api import adapt
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
from moetta.nn.ranks import Ranks, Share, even
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
                yield from Session(prepared, folder, stop).run(checkpoint_seconds)
    return folder


class Session:
    """One process's part of a run, from the last checkpoint on.

    On several ranks each has a session with the same contents, and the first one writes.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        stop: Callable[[], bool],
        ranks: Ranks | None = None,
    ) -> None:
        self.prepared, self.folder, self.ranks = prepared, folder, ranks
        self.writes = ranks is None or ranks.rank == 0
        self.checkpoint = folder / "checkpoint"
        self.adapter = prepared.adapter(stop, ranks)
        self.baseline = prepared.baseline
        if ranks is not None:
            seed = prepared.cell.seed
            self.baseline = adapt(prepared.model, BASELINE, seed=seed, process_group=ranks.group)
        self.meter = self._new_meter()
        self.peak = 0
        self.skipped: list[dict[str, Any]] = []  # images that earlier sessions could not read
        self.next = 0  # a stream may leave batches out, so this is not the meter's row count
        with self._together():
            if self.writes:
                self._restore()
        if ranks is not None:
            self._catch_up(ranks)
        self.stream = prepared.stream.starting_at(self.next)
        if ranks is not None and prepared.stream.on_error == "fail":
            self.stream = self.stream.part(ranks.rank, ranks.size)
        several = {} if ranks is None else {"ranks": ranks.size}
        with self._together():
            if self.writes and not run_folder.has_card(folder):
                write_json(folder / "card.json", prepared.card() | several)
        self.every = max(1, self.stream.batches // BASELINE_BATCHES)
        self.mask: Tensor | None = None

    def run(self, checkpoint_seconds: float) -> Generator[Progress, None, None]:
        """Run what is left of the stream, and write the results; yields after every batch."""
        device = self.prepared.cell.device
        memory.reset_peak(device)
        resumed, begun, saved = self.next, time.perf_counter(), time.perf_counter()
        before = int(self.meter.counts[..., 0].sum())
        try:
            for batch in self._batches():
                self.meter.add(self._score(batch))
                self.next = batch.number + 1
                self._compare_experts(batch.number)
                if self._first(time.perf_counter() - saved >= checkpoint_seconds):
                    with self._together():
                        self._save()
                    saved = time.perf_counter()
                yield self._progress(before, begun, resumed)
        except GeneratorExit:
            self._save()
            raise
        self.peak = max(self.peak, memory.peak(device))
        self.adapter.check_ranks()
        with self._together():
            if self.writes:
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

    def _batches(self) -> Iterator[Batch]:
        """The stream's batches; on several ranks, an image that one cannot read stops all."""
        if self.ranks is None:
            yield from self.stream
            return
        batches = iter(self.stream)
        while True:
            with self._together():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Within the block an error on one rank is one on all."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together()

    def _first(self, value: bool) -> bool:
        """What the first rank says."""
        return value if self.ranks is None else bool(self.ranks.tell(value)[0])

    def _share(self, batch: Batch) -> tuple[Batch, Share | None]:
        """This rank's part of a batch, and how that is spread over the ranks."""
        ranks, stream = self.ranks, self.prepared.stream
        if ranks is None:
            return batch, None
        if stream.on_error == "skip":  # every rank has read, or left out, the same images
            share = Share(ranks, even(len(batch), ranks.size))
            part = slice(share.start, share.start + share.count)
        else:
            left = stream.samples - batch.number * stream.batch_size
            share = Share(ranks, even(min(stream.batch_size, left), ranks.size))
            part = slice(share.count)
        images, labels, domains = (t[part] for t in (batch.images, batch.labels, batch.domains))
        return replace(batch, images=images, labels=labels, domains=domains), share

    def _score(self, batch: Batch) -> Scored:
        cell = self.prepared.cell
        batch, share = self._share(batch)
        images = batch.images.to(cell.device)
        logits, seconds = _timed(self.adapter, images)
        assert self.adapter.last is not None
        baseline, baseline_seconds = None, float("nan")
        if cell.method != BASELINE and batch.number % self.every == 0:
            baseline, baseline_seconds = _timed(self.baseline, images)
        known = [t.cpu() for t in (batch.labels, batch.domains, logits)]
        known += [] if baseline is None else [baseline.cpu()]
        if share is not None:
            known = share.wholes([_held(t) for t in known])
        labels, domains, logits = known[:3]
        if baseline is not None:
            baseline = known[3]
        if int(labels.max()) >= logits.shape[1]:
            raise ValueError(
                f"the stream has labels up to {int(labels.max())}, but {cell.model} knows only "
                f"{logits.shape[1]} classes: choose a model trained on these classes, or number "
                "the labels as it does"
            )
        if cell.method == BASELINE:
            baseline, baseline_seconds = logits, seconds
        return Scored(
            batch.number,
            domains,
            labels,
            self._masked(logits, domains),
            self.adapter.last,
            seconds,
            None if baseline is None else self._masked(baseline, domains),
            baseline_seconds,
        )

    def _masked(self, logits: Tensor, domains: Tensor) -> Tensor:
        if not self.prepared.stream.mask:
            return logits
        if self.mask is None:
            self.mask = logit_mask(self.prepared.stream.domains, logits.shape[1])
        return logits.masked_fill(~self.mask[domains], float("-inf"))

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
        if not self.writes:
            return
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

    def _catch_up(self, ranks: Ranks) -> None:
        """Take over the state that the first rank resumes from."""
        self.next = ranks.tell(self.next)[0]
        if not self.next:
            return
        state = to_bytes({k: v.cpu().contiguous() for k, v in self.adapter.state_dict().items()})
        told = ranks.broadcast(state if self.writes else None)
        if not self.writes:
            self.adapter.load_state_dict(from_bytes(told))


def _held(rows: Tensor) -> Tensor:
    """The rows, or one of zeros where there is none."""
    return rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])


def _timed(adapter: Adapter, images: Tensor) -> tuple[Tensor, float]:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    begun = time.perf_counter()
    logits = adapter(images)
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return logits, time.perf_counter() - begun
