"""Early stopping of a grid's poor cells, by a scheduler of Ray Tune."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moetta.bench.backends import failure
from moetta.bench.cell import BASELINE, Cell
from moetta.bench.cell_run import run_cell
from moetta.bench.finished import early_stop_file, find_unfinished
from moetta.bench.interrupts import Stopped
from moetta.bench.progress import Outcome, Progress
from moetta.bench.ray_backend import (
    LOCK_SECONDS,
    STOP_SECONDS,
    Assignment,
    OnRay,
    messages,
    post,
    results_folder,
)
from moetta.bench.ray_cluster import RETRIES, Needs, Surroundings
from moetta.files import write_json
from moetta.ray_connect import import_ray
from moetta.results.runs import SCHEMA

GRACE, FACTOR = 20, 2
"""Cells are compared after 20, 40 and 80 % of the stream; of those that got so far, the best half
goes on."""
REPORT_PERCENT = 5
"""Cells report at multiples of this share of the stream, so that like is compared with like."""
REPORT_SECONDS = 2.0
"""They also report after this time, so that they can be stopped."""


@dataclass
class EarlyStopping(OnRay):
    """Runs cells on Ray, and stops those that fall behind others of their group.

    A group is what differs only in the configuration, such as the learning rates of one method.
    ASHA decides which cells go on, as they report. A cell that was stopped has no result: its
    folder holds a checkpoint and a mark, and `Outcome.stopped` says how far it came. A cell that
    was not stopped has exactly the result it would have had without rivals.
    """

    _queue: dict[int, Cell] = field(default_factory=dict)
    _race: threading.Thread | None = None
    _racing: dict[int, Cell] = field(default_factory=dict)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def submit(self, cell: Cell) -> int:
        """Keep a cell until its whole group is here."""
        self._tickets += 1
        self._queue[self._tickets] = replace(cell, threads=cell.threads or 1)
        return self._tickets

    def progress(self) -> list[tuple[int, Progress]]:
        """What workers have posted, after a moment."""
        if self._queue and self._race is None:
            self._begin()
        if self._race is not None and not self._race.is_alive():
            self._race = None
            for ticket in self._racing:
                lost = Outcome(
                    error="Ray Tune ended without a word on it; the same command resumes"
                )
                self._results.setdefault(ticket, lost)
            self._racing.clear()
        if self._tasks:
            return super().progress()
        time.sleep(0.2)
        return self._collect()

    def cancel(self) -> None:
        """Stop all cells: those that run write a checkpoint first."""
        self._queue.clear()
        if self._race is not None:
            if not self._racing.keys() <= self._results.keys():
                self._cancelled.set()
                self._board.cancel.remote()
            self._race.join(STOP_SECONDS)  # also at the end, when the last may still write its mark
            self._race = None
        super().cancel()

    def _begin(self) -> None:
        groups: dict[Cell, list[int]] = {}
        for ticket, cell in self._queue.items():
            groups.setdefault(replace(cell, overrides=(), variant=None), []).append(ticket)
        for key, tickets in groups.items():
            for ticket in tickets:
                if len(tickets) == 1 or key.method == BASELINE:
                    self._cells[ticket] = self._queue[ticket]
                    self._launch(ticket)
                else:
                    self._racing[ticket] = self._queue[ticket]
        self._queue.clear()
        if self._racing:
            jobs = [Job(ticket, cell) for ticket, cell in self._racing.items()]
            names = {key: f"group {i}" for i, key in enumerate(groups)}
            jobs = [
                replace(j, group=names[replace(j.cell, overrides=(), variant=None)]) for j in jobs
            ]
            self._race = threading.Thread(target=self._run, args=(jobs,), daemon=True)
            self._race.start()

    def _run(self, jobs: list[Job]) -> None:
        try:
            assignment = Assignment(
                self.root.absolute(), self.store, self.checkpoint_seconds, Surroundings.here()
            )
            _tune(jobs, assignment, self._board, _Grid(self._cancelled.is_set, self._end))
        except Exception as error:
            for job in jobs:
                self._results.setdefault(job.ticket, failure(error))

    def _end(self, ticket: int, ending: dict[str, Any]) -> None:
        """A trial is over; called by Tune's thread."""
        if self._cancelled.is_set():
            return
        if ending.get("folder"):
            self._results[ticket] = self._fetched(str(ending["folder"]))
        elif ending.get("error"):
            self._results[ticket] = Outcome(error=ending["error"], details=ending.get("details"))
        else:
            self._results[ticket] = Outcome(stopped=_words(ending))


@dataclass(frozen=True)
class Job:
    """A cell in a race."""

    ticket: int
    cell: Cell
    group: str = ""


class _Grid:
    """What the race asks and tells the grid.

    Tune pickles all it is given, so that a race could be restored elsewhere. This one never is:
    cells resume from their own checkpoints.
    """

    def __init__(
        self,
        cancelled: Callable[[], bool] = lambda: False,
        end: Callable[[int, dict[str, Any]], None] = lambda ticket, ending: None,
    ) -> None:
        self.cancelled, self.end = cancelled, end

    def __reduce__(self) -> Any:
        return _Grid, ()


def _words(state: dict[str, Any]) -> str:
    return (
        f"stopped early after {state['batches']} of {state['of']} batches, accuracy "
        f"{100 * state['accuracy']:.2f} % until then"
    )


def _tune(jobs: list[Job], assignment: Assignment, board: Any, grid: _Grid) -> None:
    """Race the jobs against each other, each within its group."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new one prints to stdout even when told not to
    import_ray()
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

    class PerGroup(FIFOScheduler):
        """One ASHA per group."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.schedulers = {
                group: ASHAScheduler(
                    time_attr="percent",
                    metric="accuracy",
                    mode="max",
                    max_t=101,  # a cell ends by itself
                    grace_period=GRACE,
                    reduction_factor=FACTOR,
                )
                for group in {job.group for job in jobs}
            }

        def _of(self, trial: Any) -> Any:
            return self.schedulers[jobs[trial.config["index"]].group]

        def on_trial_add(self, controller: Any, trial: Any) -> None:
            self._of(trial).on_trial_add(controller, trial)

        def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> Any:
            if result.get("folder") or result.get("error") or "accuracy" not in result:
                return TrialScheduler.CONTINUE
            return self._of(trial).on_trial_result(controller, trial, result)

        def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
            if "accuracy" in result:
                self._of(trial).on_trial_complete(controller, trial, result)

    class Stopper(tune.Stopper):
        """Stops all trials when the grid is cancelled."""

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return grid.cancelled()

        def stop_all(self) -> bool:
            return grid.cancelled()

    class Endings(tune.Callback):
        """Tells the grid how trials ended."""

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            grid.end(jobs[trial.config["index"]].ticket, dict(trial.last_result))

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            if trial.num_failures > RETRIES:
                lost = f"its worker was lost {trial.num_failures} times; out of memory? The same "
                grid.end(jobs[trial.config["index"]].ticket, {"error": f"{lost}command resumes it"})

    needs = [Needs.of(job.cell) for job in jobs]
    cpus, gpus = max(n.cpus for n in needs), max(n.gpus for n in needs)
    resources = {"cpu": float(cpus), "gpu": float(gpus)}
    trial = tune.with_parameters(_trial(), jobs=jobs, assignment=assignment, board=board)
    with tempfile.TemporaryDirectory(prefix="moetta-tune-") as folder:
        tune.Tuner(
            tune.with_resources(trial, resources),
            param_space={"index": tune.grid_search(list(range(len(jobs))))},
            tune_config=tune.TuneConfig(scheduler=PerGroup()),
            run_config=tune.RunConfig(
                name="race",
                storage_path=folder,
                stop=Stopper(),
                callbacks=[Endings()],
                # Cells write their own checkpoints.
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                verbose=0,
            ),
        ).fit()


def _trial() -> Any:
    from ray import tune

    class CellTrial(tune.Trainable):
        """A cell that reports to Tune; `Follower` does the work."""

        def setup(  # type: ignore[override]  # Tune passes the parameters it was given
            self, config: dict[str, Any], jobs: list[Job], assignment: Assignment, board: Any
        ) -> None:
            self.follower = Follower(jobs[config["index"]], assignment, board)

        def step(self) -> dict[str, Any]:
            return self.follower.step()

        def cleanup(self) -> None:
            self.follower.end()

    return CellTrial


class Follower:
    """Runs a cell piece by piece, in a worker of Ray."""

    def __init__(self, job: Job, assignment: Assignment, board: Any) -> None:
        self.job, self.board = job, board
        assignment.surroundings.enter()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(messages(board, job.cell))
        place = results_folder(job.cell, assignment)
        self.root, self.save = self.stack.enter_context(place)
        self.steps: Generator[Progress, None, Path] | None = run_cell(
            job.cell, self.root, assignment.checkpoint_seconds, self._stop, patience=LOCK_SECONDS
        )
        self.reached, self._asked, self._answer = 0, 0.0, False
        self.latest: Progress | None = None

    def step(self) -> dict[str, Any]:
        """Go on for a while; returns a report for Tune."""
        found = find_unfinished(self.job.cell, self.root)
        if self.latest is None and found is not None and early_stop_file(found).exists():
            self.steps = None
            return {**json.loads(early_stop_file(found).read_text()), "done": True}
        begun = time.monotonic()
        try:
            while True:
                assert self.steps is not None
                self.latest = next(self.steps)
                percent = 100 * self.latest.samples // self.latest.samples_total
                stage, late = percent // REPORT_PERCENT, time.monotonic() - begun > REPORT_SECONDS
                if stage > self.reached or late:
                    self.reached = stage
                    post(self.board, self.job.ticket, self.latest)
                    self.save()
                    return {"percent": percent, **_state(self.latest)}
        except StopIteration as done:
            ending: dict[str, Any] = {"folder": done.value.name}
        except Stopped:
            ending = {}
        except Exception as error:
            failed = failure(error)
            ending = {"error": failed.error, "details": failed.details}
        self.steps = None
        self.save()
        return {"percent": 100, **ending, "done": True}

    def end(self) -> None:
        """Write a checkpoint; if the cell fell behind, with a mark that says so."""
        if self.steps is not None:
            self.steps.close()
            found = find_unfinished(self.job.cell, self.root)
            if self.latest is not None and found is not None and not self._stop():
                write_json(early_stop_file(found), {"schema": SCHEMA, **_state(self.latest)})
            self.save()
        self.stack.close()

    def _stop(self) -> bool:
        """Whether the grid was cancelled; asked once per second at most."""
        if time.monotonic() - self._asked > 1:
            self._answer = bool(import_ray().get(self.board.is_cancelled.remote()))
            self._asked = time.monotonic()
        return self._answer


def _state(progress: Progress) -> dict[str, Any]:
    return {"batches": progress.step, "of": progress.steps, "accuracy": progress.accuracy}
