"""Runs cells in this process or in several, behind a small interface for other back ends."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from moetta.bench import interrupts
from moetta.bench.cell import Cell
from moetta.bench.cell_run import run_cell
from moetta.bench.progress import Outcome, Progress, Refused

TAKEN = "taken"
"""The first message of a worker about a cell."""


class Backend(Protocol):
    """What `run_grid` needs from a back end."""

    def prepare(self, cells: Sequence[Cell], unsure: Sequence[Cell] = ()) -> None:
        """Check that cells can run, before anything starts; raises an error that says what to do.

        Args:
            cells: cells to check and to run.
            unsure: cells that were run before and may have to be run again.
        """
        ...

    def submit(self, cell: Cell) -> int:
        """Take a cell; returns its ticket."""
        ...

    def progress(self) -> list[tuple[int, Progress]]:
        """News since the last call, by ticket; waits for some briefly, or does some work."""
        ...

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended; None if it has not ended yet."""
        ...

    def cancel(self) -> None:
        """Stop all work and free its resources; running cells write a checkpoint first."""
        ...


class Serial:
    """One cell after another, in this process: each call of `progress` computes one batch."""

    def __init__(self, root: Path, checkpoint_seconds: float = 30.0) -> None:
        self.root, self.checkpoint_seconds = root, checkpoint_seconds
        self._waiting: list[tuple[int, Cell]] = []
        self._running: tuple[int, Generator[Progress, None, Path]] | None = None
        self._results: dict[int, Outcome] = {}
        self._tickets = 0

    def prepare(self, cells: Sequence[Cell], unsure: Sequence[Cell] = ()) -> None:
        """Check the cells."""
        _check_here(cells)

    def submit(self, cell: Cell) -> int:
        """Queue a cell."""
        self._tickets += 1
        self._waiting.append((self._tickets, cell))
        return self._tickets

    def progress(self) -> list[tuple[int, Progress]]:
        """Compute the next batch."""
        if self._running is None:
            if not self._waiting:
                return []
            ticket, cell = self._waiting.pop(0)
            work = run_cell(cell, self.root, self.checkpoint_seconds, interrupts.requested)
            self._running = (ticket, work)
        ticket, work = self._running
        try:
            return [(ticket, next(work))]
        except StopIteration as done:
            self._results[ticket] = Outcome(done.value)
        except Exception as error:
            # If a signal reaches the loaders too, they die first; that is not a failure.
            if not interrupts.requested():
                self._results[ticket] = failure(error)
        self._running = None
        return []

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended."""
        return self._results.get(ticket)

    def cancel(self) -> None:
        """Write a checkpoint of the running cell."""
        self._waiting.clear()
        if self._running is not None:
            self._running[1].close()
            self._running = None


@dataclass
class _Worker:
    """A process that runs cells.

    Attributes:
        process: the process.
        pipe: our end of its pipe.
        job: ticket and cell that it was given, if any.
        taken: whether it has said that it took that cell.
        proven: whether it has taken a cell before.
    """

    process: SpawnProcess
    pipe: Connection
    job: tuple[int, Cell] | None = None
    taken: bool = False
    proven: bool = False


@dataclass
class Processes:
    """Several cells at once; each worker is a process that runs one cell after another."""

    root: Path
    workers: int
    checkpoint_seconds: float = 30.0
    _waiting: list[tuple[int, Cell]] = field(default_factory=list)
    _results: dict[int, Outcome] = field(default_factory=dict)
    _crew: list[_Worker] = field(default_factory=list)
    _tickets: int = 0

    def prepare(self, cells: Sequence[Cell], unsure: Sequence[Cell] = ()) -> None:
        """Check the cells."""
        _check_here(cells)

    def submit(self, cell: Cell) -> int:
        """Queue a cell."""
        self._tickets += 1
        # Workers that each used all cores would slow each other down.
        threads = cell.threads or max(1, (os.cpu_count() or 1) // self.workers)
        self._waiting.append((self._tickets, replace(cell, threads=threads)))
        return self._tickets

    def progress(self) -> list[tuple[int, Progress]]:
        """Hand out cells, and collect the messages that workers send within a moment."""
        self._hand_out()
        news: list[tuple[int, Progress]] = []
        busy = {worker.pipe: worker for worker in self._crew if worker.job is not None}
        for pipe in wait(list(busy), timeout=0.2):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.job is not None
            try:
                message = worker.pipe.recv()
            except (EOFError, ConnectionError):
                self._bury(worker)
                continue
            if message == TAKEN:
                worker.taken = worker.proven = True
            elif isinstance(message, Progress):
                news.append((worker.job[0], message))
            else:
                self._results[worker.job[0]] = message
                worker.job, worker.taken = None, False
        return news

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended."""
        return self._results.get(ticket)

    def cancel(self) -> None:
        """Ask the workers to stop at the next batch, and wait for their checkpoints."""
        self._waiting.clear()
        for worker in self._crew:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        try:
            for worker in self._crew:
                _await_end(worker)
        finally:  # a second signal stops at once; the last checkpoints remain
            self._end()

    def _end(self) -> None:
        for worker in self._crew:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._crew.clear()
        atexit.unregister(self._end)

    def _bury(self, worker: _Worker) -> None:
        """Remove a dead worker; its cell failed, unless the worker died before it took the cell."""
        worker.process.join()
        worker.pipe.close()
        self._crew.remove(worker)
        if worker.job is None:
            return
        if worker.proven and not worker.taken:
            self._waiting.insert(0, worker.job)
            return
        self._results[worker.job[0]] = Outcome(
            error=f"its process died (exit code {worker.process.exitcode}); out of memory? The "
            "same command resumes it"
        )

    def _hand_out(self) -> None:
        for worker in [w for w in self._crew if w.job is None and not w.process.is_alive()]:
            self._bury(worker)
        while self._waiting:
            idle = next((w for w in self._crew if w.job is None), None)
            if idle is None:
                if len(self._crew) == self.workers:
                    return
                idle = self._hire()
            idle.job = self._waiting.pop(0)
            with contextlib.suppress(OSError):  # if it died, `progress` notices it by the pipe
                idle.pipe.send(idle.job[1])

    def _hire(self) -> _Worker:
        # A fork would inherit torch's threads in an unknown state. Daemons may not have children,
        # and a cell's loaders are children, so this is not a daemon. But Python waits for other
        # processes before it exits, and this one waits for cells: the exit must end it. If we are
        # killed, it ends itself.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, self.root, self.checkpoint_seconds), daemon=False
        )
        atexit.register(self._end)
        with interrupts.ignored():
            process.start()
        there.close()
        worker = _Worker(process, here)
        self._crew.append(worker)
        return worker


def _check_here(cells: Sequence[Cell]) -> None:
    for cell in cells:
        cell.check()


def _await_end(worker: _Worker) -> None:
    while worker.process.is_alive():
        try:  # read its last messages, or it could block for ever while sending them
            if worker.pipe.poll(0.1):
                worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()


def _serve(pipe: Any, root: Path, checkpoint_seconds: float) -> None:
    """A worker's main loop: run cells and report on them until told to stop or abandoned."""
    interrupts.ignore()  # the process that started this one decides when to stop
    try:
        while (cell := pipe.recv()) is not None and not pipe.poll():  # a stop may follow at once
            pipe.send(TAKEN)
            work, told = run_cell(cell, root, checkpoint_seconds, pipe.poll), 0.0
            try:
                while True:
                    progress = next(work)
                    if pipe.poll():  # only one message can come while a cell runs: stop
                        work.close()
                        return
                    if time.monotonic() - told > 0.2:
                        pipe.send(progress)
                        told = time.monotonic()
            except StopIteration as done:
                pipe.send(Outcome(done.value))
            except interrupts.Stopped:
                return
            except Exception as error:
                pipe.send(failure(error))
    except (EOFError, OSError):
        return  # the process that started this one is gone; the last checkpoint remains


def failure(error: Exception) -> Outcome:
    """How a cell ended that raised this; a traceback is kept unless the error explains itself."""
    if isinstance(error, (ValueError, OSError)):
        return Outcome(error=str(error), refused=isinstance(error, Refused))
    details = "".join(traceback.format_exception(error))
    return Outcome(error=f"{type(error).__name__}: {error}", details=details)


def make_backend(root: Path, workers: int, checkpoint_seconds: float = 30.0) -> Backend:
    """Cells one after another in this process, or in several processes."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if workers == 1:
        return Serial(root, checkpoint_seconds)
    return Processes(root, workers, checkpoint_seconds)
