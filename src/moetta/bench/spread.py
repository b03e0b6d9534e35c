"""One cell over several ranks: what `torchrun -m moetta run` does.

Every rank runs the cell on its part of each batch. The first one (the leader) looks for earlier
results, writes the run's folder and decides when to save; the others need not see that folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moetta.bench import interrupts
from moetta.bench.cell import Cell
from moetta.bench.cell_run import Session
from moetta.bench.finished import find_finished, is_finished
from moetta.bench.lock import locked
from moetta.bench.progress import Listener, Outcome, Progress
from moetta.bench.protocol import prepare
from moetta.methods import find
from moetta.nn.ranks import RankLost, Ranks

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another one that is alive but does not answer."""
log = logging.getLogger("moetta")
RESUME = "the same command resumes from the last checkpoint"


def launched() -> int:
    """How many ranks torchrun has started for this command; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def check(cells: Sequence[Cell], workers: int) -> Cell:
    """The one cell that several ranks can run.

    Raises:
        ValueError: there are more, or something else that several ranks cannot do.
    """
    count = launched()
    unique = list(dict.fromkeys(cells))
    if len(unique) > 1:
        raise ValueError(
            f"torchrun started {count} ranks for {len(unique)} runs: several ranks share the "
            "batches of one run; give one method, stream, model and seed, or leave torchrun out "
            f"and use --workers {count}"
        )
    if workers > 1:
        raise ValueError(
            f"--workers {workers} computes several runs at once, torchrun one run on {count} "
            "ranks: use one of the two"
        )
    cell = unique[0]
    if why := find(cell.method).adapter.steps_alone():
        raise ValueError(f"{cell.method} cannot run on several ranks: {why}")
    if ":" in cell.device:
        raise ValueError(f"every rank takes its own GPU: give --device cuda, not {cell.device}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cell.device == "cuda" and here > torch.cuda.device_count():
        raise ValueError(
            f"torchrun started {here} ranks here, but torch sees {torch.cuda.device_count()} CUDA "
            "devices; use --nproc-per-node with that number, or --device cpu"
        )
    if cell.device not in ("cpu", "cuda"):
        raise ValueError(f"several ranks need --device cpu or cuda, not {cell.device}")
    return cell


def join(device: str) -> Ranks:
    """Find the other ranks that torchrun started."""
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group)


def run_spread(
    cell: Cell, root: Path, ranks: Ranks, listener: Listener, checkpoint_seconds: float = 30.0
) -> Outcome:
    """Run a cell, or what is left of it, on all ranks; returns how it ended.

    Raises:
        KeyboardInterrupt: a rank got Ctrl-C or SIGTERM; finished work is kept.
    """
    leader = ranks.rank == 0
    folder: Path | None = None
    with ranks.together():
        found = find_finished(cell, root) if leader else None
        if found is not None and found.certain:
            folder = found.folder
        else:
            cell.check()
    listener.begin([cell])
    with interrupts.deferred():
        outcome = Outcome(folder)
        if not ranks.any(folder is not None):
            outcome = _run(cell, root, ranks, listener, checkpoint_seconds)
        listener.finish(cell, outcome)
    if outcome.error is None:  # a rank that is gone could not say goodbye
        dist.destroy_process_group(ranks.group)
    return outcome


def _run(
    cell: Cell, root: Path, ranks: Ranks, listener: Listener, checkpoint_seconds: float
) -> Outcome:
    work = _batches(cell, root, ranks, checkpoint_seconds)
    try:
        while True:
            listener.update(cell, next(work))
            # Signals reach the ranks at different moments; they stop after the same batch.
            if ranks.any(interrupts.requested()):
                work.close()
                break
    except StopIteration as done:
        return Outcome(done.value)
    except RankLost as lost:
        if ranks.rank:  # the lost one may be the first, which would say so
            log.error("%s; %s", lost, RESUME)
        return Outcome(error=f"{lost}; {RESUME}")
    except (ValueError, OSError, RuntimeError, interrupts.Stopped) as error:
        # All ranks have this error: nothing is raised on one alone.
        if not ranks.any(interrupts.requested()):
            return Outcome(error=str(error))
    listener.stop(0, 1)
    raise KeyboardInterrupt


def _batches(
    cell: Cell, root: Path, ranks: Ranks, checkpoint_seconds: float
) -> Generator[Progress, None, Path]:
    """`run_cell` on several ranks."""
    if cell.threads:
        torch.set_num_threads(cell.threads)
    with ranks.together():
        prepared = prepare(cell)
    folder = root / prepared.key
    leader = ranks.rank == 0
    with contextlib.ExitStack() as held:
        with ranks.together():
            if leader:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder))
        if not ranks.any(leader and is_finished(folder)):
            session = Session(prepared, folder, interrupts.requested, ranks)
            yield from session.run(checkpoint_seconds)
    return folder
