"""One cell, from its last checkpoint to its results; it knows nothing of who runs it."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.bench import run_folder
from moetta.bench.cell import Cell
from moetta.bench.meter import Meter, Scored
from moetta.bench.protocol import Prepared, prepare
from moetta.core.adapter import Adapter
from moetta.data import Batch, logit_mask
from moetta.files import read_safetensors, write_atomically

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two commands apart
    fcntl = None  # type: ignore[assignment]

BASELINE_BATCHES = 64
SIMILARITY_POINTS = 40
LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Progress:
    """Where a cell is.

    Attributes:
        step: batches done.
        steps: batches in the stream.
        samples: images seen.
        samples_total: images in the stream.
        accuracy: share of right answers so far.
        gain: accuracy minus the source model's, over the batches that both saw; None before any.
        rate: images a second, in this session.
        eta: seconds left.
        resumed: the batch at which this session took up an earlier one.
    """

    step: int
    steps: int
    samples: int
    samples_total: int
    accuracy: float
    gain: float | None
    rate: float
    eta: float
    resumed: int = 0


def run_cell(
    cell: Cell, root: Path, checkpoint_seconds: float = 30.0
) -> Generator[Progress, None, Path]:
    """Run a cell, or what is left of it; yields after every batch and returns its folder.

    A finished cell is not run again. Closing the generator writes a checkpoint. A cell that another
    process goes on running raises an error: two writers would mix their checkpoints.

    Args:
        cell: what to run.
        root: folder of the results.
        checkpoint_seconds: how much work a killed process may lose.
    """
    if cell.threads:
        torch.set_num_threads(cell.threads)
    prepared = prepare(cell)
    folder = root / prepared.key
    if not run_folder.finished(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not run_folder.finished(folder):  # by a process that had the lock before
                yield from _Session(prepared, folder).run(checkpoint_seconds)
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None, None, None]:
    """Holds a run's lock, which the system drops when the process ends, however it ends."""
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            _wait_for(lock, folder)
        yield
    with contextlib.suppress(FileNotFoundError):
        (folder / "lock").unlink()


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Takes the lock; the worker of a command that was killed keeps it to the end of its batch."""
    begun, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - begun >= LOCK_SECONDS:
                raise BlockingIOError(
                    f"another command is running this cell in {folder}; wait for it, stop it, or "
                    "choose another folder with --out"
                ) from None
        if not told:
            limit = f"{LOCK_SECONDS:.0f} s"
            print(f"{folder} is in use by another process; waiting up to {limit}", file=sys.stderr)
            told = True
        time.sleep(0.2)


class _Session:
    """One process's part in a run."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        self.prepared, self.folder = prepared, folder
        self.checkpoint = folder / "checkpoint"
        stream = prepared.stream
        experts = getattr(prepared.config, "experts", 0)
        self.meter = Meter(stream.domain_names, stream.batches, experts)
        self.adapter = prepared.adapter()
        self.peak = 0
        self.skipped: list[dict[str, Any]] = []  # pictures that earlier sessions could not read
        self.next = 0  # batches may be left out of a stream, so this is not the meter's rows
        self._restore()
        if not run_folder.has_card(folder):
            run_folder.write_json(folder / "card.json", prepared.card())
        self.every = max(1, stream.batches // BASELINE_BATCHES)
        self.mask: Tensor | None = None

    def run(self, checkpoint_seconds: float) -> Generator[Progress, None, None]:
        stream = self.stream = self.prepared.from_batch(self.next)
        _reset_peak(self.prepared.cell.device)
        resumed, begun, saved = self.next, time.perf_counter(), time.perf_counter()
        before = int(self.meter.counts[..., 0].sum())
        try:
            for batch in stream:
                self.meter.add(self._score(batch))
                self.next = batch.number + 1
                self._look_at_experts(batch.number)
                if time.perf_counter() - saved >= checkpoint_seconds:
                    self._save()
                    saved = time.perf_counter()
                yield self._progress(before, begun, resumed)
        except GeneratorExit:
            self._save()
            raise
        self.peak = max(self.peak, _peak(self.prepared.cell.device))
        skipped = self._unread()
        run_folder.write_run(
            self.folder, self.prepared, self.adapter, self.meter, self.peak, skipped
        )
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def _unread(self) -> list[dict[str, Any]]:
        return self.skipped + [vars(unread) for unread in self.stream.skipped]

    def _score(self, batch: Batch) -> Scored:
        cell = self.prepared.cell
        batch_here = batch.to(cell.device)
        logits, seconds = _timed(self.adapter, batch_here.images)
        if int(batch.labels.max()) >= logits.shape[1]:
            raise ValueError(
                f"the stream has labels up to {int(batch.labels.max())}, but {cell.model} knows "
                f"only {logits.shape[1]} classes: they do not belong together, or the labels are "
                "numbered otherwise"
            )
        assert self.adapter.last is not None
        baseline, baseline_seconds = None, float("nan")
        if cell.method == "noadapt":
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

    def _look_at_experts(self, step: int) -> None:
        steps = self.meter.batches
        interval = max(1, steps // SIMILARITY_POINTS)
        if step % interval == 0 or step == steps - 1:
            self.meter.measure_similarity(step, self.adapter)

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
        """Write a checkpoint: its parts under names of their own, then the word that it stands."""
        self.checkpoint.mkdir(exist_ok=True)
        self.peak = max(self.peak, _peak(self.prepared.cell.device))
        names = {kind: f"{kind}-{self.next}.safetensors" for kind in ("adapter", "meter")}
        self.adapter.save(self.checkpoint / names["adapter"])
        tensors = {name: t.contiguous() for name, t in self.meter.tensors().items()}
        write_atomically(self.checkpoint / names["meter"], to_bytes(tensors))
        progress = {"schema": run_folder.SCHEMA, "step": self.next, "peak": self.peak, **names}
        progress["skipped"] = self._unread()
        run_folder.write_json(self.checkpoint / "progress.json", progress)
        for old in self.checkpoint.iterdir():
            if old.name not in (*names.values(), "progress.json"):
                old.unlink(missing_ok=True)

    def _restore(self) -> None:
        """Take up the last checkpoint, if there is one; a damaged one means a new start."""
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
            self.meter = Meter(self.meter.domains, self.meter.batches, self.meter.experts)
            print(f"{self.checkpoint}: {error}; starting this run anew", file=sys.stderr)


def _timed(adapter: Adapter, images: Tensor) -> tuple[Tensor, float]:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    begun = time.perf_counter()
    logits = adapter(images)
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return logits, time.perf_counter() - begun


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Linux: forget the peak of what this process did before
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> int:
    """Bytes: of the GPU's tensors, or else of the whole process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
