"""Runs cells on Ray: one task per cell, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moetta.bench.backends import failure
from moetta.bench.cell import BASELINE, Cell, resolve_config
from moetta.bench.cell_run import run_cell
from moetta.bench.finished import folder_name
from moetta.bench.interrupts import Stopped
from moetta.bench.progress import Outcome, Progress
from moetta.bench.ray_cluster import RETRIES, Needs, Surroundings, check_nodes, connect
from moetta.bench.store import Store
from moetta.methods import find
from moetta.ray_connect import import_ray

LOCK_SECONDS = 300.0
"""How long to wait for a worker on a lost node: it does not know yet that it has been replaced."""
TELL_SECONDS = 0.3
"""How often a worker reports its progress."""
BOARD_SECONDS = 300.0
"""How long the first worker on this machine may take to start."""
LOST_SECONDS = 20.0
"""How long Ray may take to start a cell again whose node is dead.

It fails calls to a dead worker only when they break by themselves. If the link was cut they do not:
the next sign of life that it sends is due after up to five minutes.
"""
STOP_SECONDS = 120.0
"""How long workers may take to write their checkpoints when the grid is stopped."""
log = logging.getLogger("moetta")


@dataclass(frozen=True)
class Assignment:
    """What a worker needs to know besides the cell.

    Attributes:
        root: folder of the results, if all nodes share it.
        store: URL of the results, if they do not.
        checkpoint_seconds: how many seconds of work a killed process may lose.
        surroundings: where the command runs.
    """

    root: Path
    store: str | None
    checkpoint_seconds: float
    surroundings: Surroundings


@dataclass
class OnRay:
    """Cells as tasks of Ray, which schedules them and starts those again whose worker is lost.

    Args:
        root: folder of the results on this machine.
        address: the cluster, see `ray_connect.connect`; without one, Ray is started here.
        store: URL of the results; without one, all nodes must share ``root``.
        checkpoint_seconds: how many seconds of work a lost worker may cost.
    """

    root: Path
    address: str | None = None
    store: str | None = None
    checkpoint_seconds: float = 30.0
    _tasks: dict[Any, int] = field(default_factory=dict)
    _cells: dict[int, Cell] = field(default_factory=dict)
    _nodes: dict[int, str] = field(default_factory=dict)  # where each cell was begun last
    _dead: dict[str, float] = field(default_factory=dict)  # when a node was first seen to be dead
    _results: dict[int, Outcome] = field(default_factory=dict)
    _tickets: int = 0
    _board: Any = None
    _news: Any = None

    def prepare(self, cells: Sequence[Cell], unsure: Sequence[Cell] = ()) -> None:
        """Connect to Ray, and check that every node can run the cells.

        Raises:
            ValueError: what a node lacks, by node; or Ray is not installed or of another version.
            ConnectionError: no cluster answers.
        """
        for cell in cells:
            if ":" in cell.device:
                raise ValueError(
                    f"on Ray, --device is cpu, cuda or mps, got {cell.device!r}: Ray chooses "
                    "which GPU a run gets"
                )
            if self.address is None:
                cell.check()  # saves starting Ray for a misspelt name
            else:
                resolve_config(cell)
        if self.store is not None:
            Store(self.store)
        connect(self.address)
        needs = [Needs.of(cell) for cell in (*cells, *unsure)]
        option = "--out" if self.store is None else "--store"
        check_nodes(cells, needs, self.store or str(self.root.absolute()), option)
        self._board = _make_board()

    def submit(self, cell: Cell) -> int:
        """Hand a cell to Ray."""
        self._tickets += 1
        self._cells[self._tickets] = replace(cell, threads=cell.threads or 1)
        self._launch(self._tickets)
        return self._tickets

    def _launch(self, ticket: int) -> None:
        ray = import_ray()
        cell = self._cells[ticket]
        needs = Needs.of(cell)
        task = ray.remote(work).options(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
            name=cell.label,
        )
        assignment = Assignment(
            self.root.absolute(), self.store, self.checkpoint_seconds, Surroundings.here()
        )
        self._tasks[task.remote(cell, ticket, assignment, self._board)] = ticket

    def progress(self) -> list[tuple[int, Progress]]:
        """What workers have posted, after a moment."""
        ray = import_ray()
        try:
            ended, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0.2)
            dead = [node["NodeID"] for node in ray.nodes() if not node["Alive"]]
        except (ConnectionError, ray.exceptions.RaySystemError) as error:
            raise ConnectionError(
                f"the connection to Ray was lost ({error}); finished runs are kept, and the same "
                "command resumes the others"
            ) from error
        for ref in ended:
            ticket = self._tasks.pop(ref)
            self._results[ticket] = self._outcome(ref)
        self._relaunch_lost(dead)
        return self._collect()

    def _relaunch_lost(self, dead: list[str]) -> None:
        """Start those cells again that Ray leaves with a node that it knows to be dead."""
        ray = import_ray()
        for node in dead:
            self._dead.setdefault(node, time.monotonic())
        given_up = {n for n, seen in self._dead.items() if time.monotonic() - seen > LOST_SECONDS}
        for ref, ticket in list(self._tasks.items()):
            if self._nodes.get(ticket) in given_up:
                ray.cancel(ref, force=True)  # or Ray would start it once more, later
                del self._tasks[ref], self._nodes[ticket]
                self._launch(ticket)

    def result(self, ticket: int) -> Outcome | None:
        """How a cell ended."""
        return self._results.get(ticket)

    def cancel(self) -> None:
        """Stop all cells: those that run write a checkpoint first."""
        if self._board is None:
            return
        ray = import_ray()
        try:
            for ref in self._tasks:
                ray.cancel(ref)
            if self._tasks:
                ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=STOP_SECONDS)
            for _ in range(2):  # the last messages; the first answer may be older than they are
                self._collect(timeout=1.0)
        finally:  # a second signal stops at once; the last checkpoints remain
            with contextlib.suppress(ConnectionError, ray.exceptions.RayError):
                for ref in self._tasks:
                    ray.cancel(ref, force=True)
                ray.kill(self._board)
            self._tasks.clear()
            self._board = self._news = None

    def _collect(self, timeout: float = 0.1) -> list[tuple[int, Progress]]:
        ray = import_ray()
        if self._news is None:
            self._news = self._board.collect.remote()
        ready, _ = ray.wait([self._news], timeout=timeout)
        if not ready:
            return []
        try:
            progress, messages, nodes = ray.get(self._news)
        except ray.exceptions.RayError:  # the board is started again, empty
            progress, messages, nodes = {}, [], {}
        self._news = None
        self._nodes |= nodes
        for level, text in messages:
            log.log(level, text)
        return [(ticket, Progress(**json.loads(sent))) for ticket, sent in progress.items()]

    def _outcome(self, ref: Any) -> Outcome:
        ray = import_ray()
        try:
            ended: Outcome = ray.get(ref)
        except ray.exceptions.TaskCancelledError:
            return Outcome(error="it was cancelled; the same command resumes it")
        except ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return Outcome(
                error=f"its worker was lost {RETRIES + 1} times; out of memory? The same command "
                f"resumes it. Ray says: {reason}"
            )
        return ended if ended.folder is None else self._fetched(ended.folder.name)

    def _fetched(self, name: str) -> Outcome:
        """A finished run in the results folder of this machine."""
        try:
            if self.store is not None:
                Store(self.store).fetch([name], self.root)
        except Exception as error:
            return failure(error)
        return Outcome(self.root / name)


def _make_board() -> Any:
    """An actor on which workers post their news, for the command to collect.

    Only news passes through it: if it is lost, no work is. It is on the machine of this command,
    which must be alive anyway.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Board:
        """Ray sends a nested class whole; this one never imports moetta, so it starts at once."""

        def __init__(self) -> None:
            self.progress: dict[int, str] = {}
            self.messages: list[tuple[int, str]] = []
            self.nodes: dict[int, str] = {}  # by ticket, since the last call
            self.begun: set[int] = set()
            self.cancelled = False

        def begin(self, ticket: int, label: str, name: str, node: str) -> None:
            if ticket in self.begun:
                self.say(logging.WARNING, f"{label}: its worker was lost; node {name} resumes it")
            self.begun.add(ticket)
            self.nodes[ticket] = node

        def post(self, ticket: int, progress: str) -> None:
            self.progress[ticket] = progress

        def say(self, level: int, text: str) -> None:
            self.messages.append((level, text))

        def cancel(self) -> None:
            self.cancelled = True

        def is_cancelled(self) -> bool:
            return self.cancelled

        def collect(self) -> tuple[dict[int, str], list[tuple[int, str]], dict[int, str]]:
            news = self.progress, self.messages, self.nodes
            self.progress, self.messages, self.nodes = {}, [], {}
            return news

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(Board)
    board = actor.remote()
    ray.get(board.collect.remote(), timeout=BOARD_SECONDS)
    return board


def post(board: Any, ticket: int, progress: Progress) -> None:
    """Tell the command how far a cell has come."""
    board.post.remote(ticket, json.dumps(asdict(progress)))


def work(cell: Cell, ticket: int, assignment: Assignment, board: Any) -> Outcome:
    """Run a cell in a worker of Ray.

    Raises:
        KeyboardInterrupt: it was cancelled, and has written a checkpoint.
    """
    ray = import_ray()
    name = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
    board.begin.remote(ticket, cell.label, name, ray.get_runtime_context().get_node_id())
    assignment.surroundings.enter()
    with messages(board, cell), _stoppable() as stop:
        try:
            with results_folder(cell, assignment) as (root, save):
                done = _follow(cell, root, assignment, stop, save, board, ticket)
                return Outcome(done)
        except Stopped:
            raise KeyboardInterrupt from None
        except Exception as error:
            if stop():  # the signal may have reached its loaders first; that is not a failure
                raise KeyboardInterrupt from None
            return failure(error)


def _follow(
    cell: Cell,
    root: Path,
    assignment: Assignment,
    stop: Callable[[], bool],
    save: Callable[[], None],
    board: Any,
    ticket: int,
) -> Path:
    """Run a cell to its end, or until it is stopped."""
    steps: Generator[Progress, None, Path]
    steps = run_cell(cell, root, assignment.checkpoint_seconds, stop, patience=LOCK_SECONDS)
    told = 0.0
    try:
        while True:
            progress = next(steps)
            if stop():
                steps.close()
                raise Stopped
            if time.monotonic() - told > TELL_SECONDS:
                post(board, ticket, progress)
                save()
                told = time.monotonic()
    except StopIteration as done:
        folder: Path = done.value
        return folder
    finally:
        save()


@contextlib.contextmanager
def results_folder(cell: Cell, assignment: Assignment) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The folder to run a cell in, and what brings its files to where all results are."""
    if assignment.store is None:
        yield assignment.root, lambda: None
        return
    store = Store(assignment.store)
    starts = {
        folder_name(cell.model_name, cell.stream_name, method)
        for method in (find(cell.method).name, BASELINE)
    }
    with tempfile.TemporaryDirectory(prefix="moetta-") as scratch:
        root = Path(scratch)
        fitting = [
            name
            for name in store.folders()
            if name.startswith(tuple(f"{start}__" for start in starts))
            and f"__s{cell.seed}__" in name
        ]
        store.fetch(fitting, root)
        yield root, lambda: store.send(root)


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within the block, `ray.cancel` and SIGTERM only make the yielded function return True.

    `ray.cancel` acts as Ctrl-C. SIGTERM means that this machine or worker goes away: once the
    checkpoint is written, Ray's own handler gets it, and the cell is run elsewhere.
    """
    cancelled, ended = threading.Event(), threading.Event()
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: cancelled.set()),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: ended.set()),
    }
    try:
        yield lambda: cancelled.is_set() or ended.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ended.is_set() and not cancelled.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def messages(board: Any, cell: Cell) -> Iterator[None]:
    """Within the block, this library's messages go to the user who started the command."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            board.say.remote(record.levelno, f"{cell.label}: {record.getMessage()}")

    handler = Handler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
