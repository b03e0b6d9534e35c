"""Runs on several processes: loaders in them, their death, the death of the command, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moetta.bench import Cell, run_grid
from moetta.bench.backends import Processes
from moetta.bench.progress import Progress, Silent

CELL = Cell("moetta", "classical", "tiny_models:vit", limit=64, batch_size=16, threads=1)
RUN = [
    sys.executable,
    "-m",
    "moetta.commands.main",
    "run",
    "--model",
    CELL.model,
    "--stream",
    CELL.stream,
]
RUN += ["--batch-size", "4", "--threads", "1", "--workers", "2", "--json"]
LONG = 600  # many processes that each import torch: minutes on a busy machine
pytestmark = pytest.mark.timeout(900)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def start(command: list[str], **options: bool) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, **options
    )


def wait_for(process: subprocess.Popen[str], event: str) -> None:
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != event:
        pass


def test_workers_may_have_loaders(tmp_path: Path) -> None:
    cells = [replace(CELL, method=m, limit=32, loaders=1) for m in ("tent", "sar")]
    outcomes = run_grid(cells, tmp_path, workers=2)
    assert [o.error for o in outcomes] == [None, None]


def test_a_worker_that_dies_costs_one_run(tmp_path: Path) -> None:
    backend = Processes(tmp_path, 2, checkpoint_seconds=0)

    class Murderer(Silent):
        def update(self, cell: Cell, progress: Progress) -> None:
            if cell.method == "moetta":
                backend._crew[0].process.kill()

    cells = [replace(CELL, limit=4000), replace(CELL, method="tent")]
    died, done = run_grid(cells, tmp_path, backend=backend, listener=Murderer())
    assert died.error is not None
    assert "its process died (exit code -9)" in died.error
    assert done.folder is not None
    assert list(tmp_path.glob("*moetta*/checkpoint/progress.json"))  # from which it would go on


UNCLEAN = """
import sys
from pathlib import Path
from moetta.bench.backends import Processes
from test_workers import CELL
if __name__ == "__main__":
    backend = Processes(Path(sys.argv[1]), 2)
    backend.submit(CELL)
    while not backend.progress():
        pass
    raise RuntimeError("unforeseen")
"""


def test_workers_do_not_outlive_a_command_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "unclean.py"
    script.write_text(UNCLEAN)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG)
    assert "unforeseen" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.parametrize("event", ["begin", "progress"])
def test_ctrl_c_reaches_the_workers_too(event: str, tmp_path: Path) -> None:
    """As a terminal sends it: to all processes, while they start or while they run."""
    command = [*RUN, "--method", "tent", "moetta", "--limit", "4000", "--out", str(tmp_path)]
    process = start(command, start_new_session=True)
    wait_for(process, event)
    time.sleep(1.0)  # the workers are importing now, or running
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["resume"]) == ("stopped", "run the same command again")
    assert "died" not in out


def test_killed_and_started_again_at_once(tmp_path: Path) -> None:
    """The orphans still hold their runs' locks for a moment; that must not fail the runs."""
    command = [*RUN, "--method", "tent", "moetta", "--limit", "400", "--out", str(tmp_path)]
    process = start(command)
    wait_for(process, "progress")
    process.kill()
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG)
    process.communicate(timeout=LONG)  # the orphans have the other end of these pipes
    assert again.returncode == 0, again.stderr
    events = [json.loads(line) for line in again.stdout.splitlines()]
    ends = [e for e in events if e["event"] == "end"]
    assert [e["summary"]["samples"] for e in ends] == [400, 400]
