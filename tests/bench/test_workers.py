"""Runs on several processes: loaders in them, their death, the death of the command, Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from moetta.bench import Cell, run_grid
from moetta.bench.backends import Processes
from moetta.bench.progress import Progress, Silent

CELL = Cell("moetta", "classical", "tiny_models:vit", limit=64, batch_size=16, threads=1)
RUN = [sys.executable, "-m", "moetta", "run", "--model", CELL.model, "--stream", CELL.stream]
RUN += ["--batch-size", "4", "--threads", "1", "--workers", "2", "--json"]
LONG = 600  # many processes that each import torch: minutes on a busy machine
pytestmark = pytest.mark.timeout(900)
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    options = {"env": ENVIRONMENT, **options}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
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


def test_a_worker_that_died_while_idle_is_replaced(tmp_path: Path) -> None:
    backend = Processes(tmp_path, 1)
    try:
        for seed in (1, 2):
            ticket = backend.submit(replace(CELL, method="tent", limit=16, seed=seed))
            while backend.result(ticket) is None:
                backend.progress()
            outcome = backend.result(ticket)
            assert outcome is not None
            assert outcome.folder is not None, outcome.error
            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            if seed == 2:  # this one is noticed before a cell is handed out
                worker.join()
    finally:
        backend.cancel()
    assert not multiprocessing.active_children()


def test_messages_of_workers_reach_stderr_once(tmp_path: Path) -> None:
    command = [*RUN, "--method", "tent", "--limit", "64", "--out", str(tmp_path)]
    first = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG)
    assert first.returncode == 0, first.stderr
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    (folder / "summary.json").unlink()
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "progress.json").write_text("{")
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("starting this run anew") == 1


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("event", ["begin", "progress"])
def test_signals_reach_the_workers_too(event: str, number: int, tmp_path: Path) -> None:
    """As a terminal or systemd sends them: to all processes, while they start or while they run."""
    command = [*RUN, "--method", "tent", "moetta", "--limit", "4000", "--out", str(tmp_path)]
    process = start(command, start_new_session=True)
    wait_for(process, event)
    time.sleep(1.0)  # the workers are importing now, or running
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["resume"]) == ("stopped", "run the same command again")
    assert "died" not in out
    if event == "progress":
        assert list(tmp_path.glob("*/checkpoint/progress.json"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_while_source_images_are_read(workers: str, tmp_path: Path) -> None:
    """The command stops without reading them to the end, and resumes later."""
    for i in range(2):
        folder = tmp_path / "photos" / "ab"[i]
        folder.mkdir(parents=True)
        for j in range(32):
            Image.new("RGB", (32, 32), (i * 99, j, 0)).save(folder / f"{j}.png")
    command = [sys.executable, "-m", "moetta", "run", "--model", "slow_models:vit", "--json"]
    command += ["--stream", str(tmp_path / "photos"), "--method", "eata", "--threads", "1"]
    command += ["--source", str(tmp_path / "photos"), "--workers", workers]
    command += ["--out", str(tmp_path / "runs"), "--batch-size", "8"]
    log = tmp_path / "log"
    process = start(command, env={**ENVIRONMENT, "SLOW_LOG": str(log)})
    wait_for(process, "begin")
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["event"] == "stopped"
    assert len(log.read_text().splitlines()) < 64
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG)
    assert again.returncode == 0, again.stderr


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
