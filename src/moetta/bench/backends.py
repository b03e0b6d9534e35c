"""Who runs the cells: this process, or several. One small interface, for others to be added."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from moetta.bench.cell import Cell
from moetta.bench.cell_run import Progress, run_cell


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Attributes:
        folder: its results, if it finished.
        error: why it did not.
        details: the traceback, for an error that is not the user's.
    """

    folder: Path | None = None
    error: str | None = None
    details: str | None = None


class Backend(Protocol):
    """What the runner asks of whoever runs cells."""

    def submit(self, cell: Cell) -> int:
        """Take a cell; returns its ticket."""
        ...

    def progress(self) -> list[tuple[int, Progress]]:
        """News since the last call, by ticket; waits a moment for some, or does some work."""
        ...

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended; None as long as it has not."""
        ...

    def cancel(self) -> None:
        """Stop all work and free what it took; cells that run write a checkpoint first."""
        ...


class Serial:
    """One cell after another, in this process: each call of `progress` computes one batch."""

    def __init__(self, root: Path, checkpoint_seconds: float = 30.0) -> None:
        self.root, self.checkpoint_seconds = root, checkpoint_seconds
        self._waiting: list[tuple[int, Cell]] = []
        self._running: tuple[int, Generator[Progress, None, Path]] | None = None
        self._results: dict[int, Outcome] = {}
        self._tickets = 0

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
            self._running = (ticket, run_cell(cell, self.root, self.checkpoint_seconds))
        ticket, work = self._running
        try:
            return [(ticket, next(work))]
        except StopIteration as done:
            self._results[ticket] = Outcome(done.value)
        except Exception as error:
            self._results[ticket] = _failure(error)
        self._running = None
        return []

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended."""
        return self._results.get(ticket)

    def cancel(self) -> None:
        """Leave a checkpoint of the cell in hand."""
        self._waiting.clear()
        if self._running is not None:
            self._running[1].close()
            self._running = None


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    ticket: int | None = None


@dataclass
class Processes:
    """Several cells at once, each worker a process that takes one cell after another."""

    root: Path
    workers: int
    checkpoint_seconds: float = 30.0
    _waiting: list[tuple[int, Cell]] = field(default_factory=list)
    _results: dict[int, Outcome] = field(default_factory=dict)
    _crew: list[_Worker] = field(default_factory=list)
    _tickets: int = 0

    def submit(self, cell: Cell) -> int:
        """Queue a cell."""
        self._tickets += 1
        # Workers that each took all cores would only get in each other's way.
        threads = cell.threads or max(1, (os.cpu_count() or 1) // self.workers)
        self._waiting.append((self._tickets, replace(cell, threads=threads)))
        return self._tickets

    def progress(self) -> list[tuple[int, Progress]]:
        """Hand out cells, and collect what the workers say within a moment."""
        self._hand_out()
        news: list[tuple[int, Progress]] = []
        busy = {worker.pipe: worker for worker in self._crew if worker.ticket is not None}
        for pipe in wait(list(busy), timeout=0.2):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.ticket is not None
            try:
                message = worker.pipe.recv()
            except (EOFError, ConnectionError):
                worker.process.join()
                self._results[worker.ticket] = Outcome(
                    error=f"its process died (exit code {worker.process.exitcode}); "
                    "out of memory? The same command resumes it"
                )
                worker.pipe.close()
                self._crew.remove(worker)
                continue
            if isinstance(message, Progress):
                news.append((worker.ticket, message))
            else:
                self._results[worker.ticket] = message
                worker.ticket = None
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
        finally:  # a second Ctrl-C stops at once; the last checkpoints stand
            self._end()

    def _end(self) -> None:
        for worker in self._crew:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._crew.clear()
        atexit.unregister(self._end)

    def _hand_out(self) -> None:
        while self._waiting:
            idle = next((w for w in self._crew if w.ticket is None), None)
            if idle is None:
                if len(self._crew) == self.workers:
                    return
                idle = self._hire()
            idle.ticket, cell = self._waiting.pop(0)
            with contextlib.suppress(OSError):  # if it died, the pipe will say so in `progress`
                idle.pipe.send(cell)

    def _hire(self) -> _Worker:
        # A fork would inherit torch's threads in an unknown state. No daemon: those may not have
        # children, such as a cell's loaders. But Python waits for other processes before it exits,
        # and this one waits for cells, so the exit must end it. If we are killed, it ends itself.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, self.root, self.checkpoint_seconds), daemon=False
        )
        atexit.register(self._end)
        with _deaf_to_interrupts():
            process.start()
        there.close()
        worker = _Worker(process, here)
        self._crew.append(worker)
        return worker


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process that is started meanwhile ignores Ctrl-C from its first moment."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _await_end(worker: _Worker) -> None:
    while worker.process.is_alive():
        try:  # what it still says must be read, or it could wait for ever to say it
            if worker.pipe.poll(0.1):
                worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()


def _serve(pipe: Any, root: Path, checkpoint_seconds: float) -> None:
    """A worker's life: take a cell, tell of it, until told to stop or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides what Ctrl-C means
    try:
        while (cell := pipe.recv()) is not None and not pipe.poll():  # a stop may follow at once
            work, told = run_cell(cell, root, checkpoint_seconds), 0.0
            try:
                while True:
                    news = next(work)
                    if pipe.poll():  # only one message can come while a cell runs: stop
                        work.close()
                        return
                    if time.monotonic() - told > 0.2:
                        pipe.send(news)
                        told = time.monotonic()
            except StopIteration as done:
                pipe.send(Outcome(done.value))
            except Exception as error:
                pipe.send(_failure(error))
    except (EOFError, OSError):
        return  # the runner is gone; the last checkpoint stands


def _failure(error: Exception) -> Outcome:
    expected = isinstance(error, (ValueError, OSError))
    details = None if expected else "".join(traceback.format_exception(error))
    return Outcome(error=f"{error}" if expected else f"{type(error).__name__}: {error}",
                   details=details)  # fmt: skip


def make_backend(root: Path, workers: int, checkpoint_seconds: float = 30.0) -> Backend:
    """Cells one after another, or on several processes."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if workers == 1:
        return Serial(root, checkpoint_seconds)
    return Processes(root, workers, checkpoint_seconds)
