"""Grids on a real Ray: the results of one process, whatever dies on the way."""

from __future__ import annotations

import json
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
from ray_clusters import ENVIRONMENT, ray_processes, worker_of
from test_resume import assert_same

import moetta
from moetta.bench import Cell, make_grid, ray_backend, run_grid
from moetta.bench.progress import Outcome, Progress, Silent
from moetta.bench.ray_backend import OnRay
from moetta.commands.main import main

ray = pytest.importorskip("ray")
COMMON: dict[str, Any] = {"stream": "classical", "model": "tiny_models:vit", "batch_size": 16}
CELLS = make_grid(
    method=["noadapt", "tent", "moetta"], seed=[1, 2, 3, 4], limit=96, threads=1, **COMMON
)
# Long enough to be stopped in its middle:
CELLS[-1] = LONGEST = replace(CELLS[-1], limit=1600, batch_size=4)
LONG = 600  # processes that each import torch, on a busy machine
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Path]:
    """The folders of the same cells, run one after another in this process."""
    outcomes = run_grid(CELLS, tmp_path_factory.mktemp("alone"))
    return {c: o.folder for c, o in zip(CELLS, outcomes, strict=True) if o.folder is not None}


def assert_like_alone(cells: list[Cell], outcomes: list[Outcome], alone: dict[Cell, Path]) -> None:
    assert [o.error for o in outcomes] == [None] * len(cells)
    for cell, outcome in zip(cells, outcomes, strict=True):
        assert outcome.folder is not None
        assert_same(outcome.folder, alone[cell])
    root = next(o.folder for o in outcomes if o.folder).parent
    names = sorted(path.name for path in root.iterdir())
    assert names == sorted(path.name for path in {alone[cell] for cell in cells})


class Watcher(Silent):
    """Kills the worker of one cell in its middle, once; keeps what it is told."""

    def __init__(self, victim: Cell | None = None) -> None:
        self.victim, self.killed = victim, 0
        self.news: list[tuple[Cell, Progress]] = []
        self.ends: list[Cell] = []

    def update(self, cell: Cell, progress: Progress) -> None:
        self.news.append((cell, progress))
        if cell == self.victim and not self.killed and (worker := worker_of(cell.label)):
            os.kill(worker, signal.SIGKILL)
            self.killed = worker

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        self.ends.append(cell)


def command(out: Path, *options: str, model: str = COMMON["model"]) -> list[str]:
    run = [sys.executable, "-m", "moetta", "run", "--model", model, "--threads", "1", "--json"]
    return [*run, "--out", str(out), *options]


def start(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **{"env": ENVIRONMENT, **options},
    )


def wait_for(process: subprocess.Popen[str], event: str, resumed: bool = False) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        found = json.loads(line)
        if found["event"] == event and (found.get("resumed") or not resumed):
            return
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


GRID = ["--stream", "classical", "--method", "tent", "moetta", "--batch-size", "4"]


def test_another_version_of_ray(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first test: later ones stay connected."""
    ray.shutdown()
    monkeypatch.setattr(ray, "__version__", "1.2.3")
    assert main(command(tmp_path / "runs", *GRID, "--ray", address)[3:]) == 1
    assert "has other versions than this machine (Ray 1.2.3, Python" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_twelve_cells_over_two_workers_one_of_which_is_killed(
    address: str, alone: dict[Cell, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Watcher(LONGEST)
    backend = OnRay(tmp_path / "runs", address, checkpoint_seconds=0)
    outcomes = run_grid(CELLS, tmp_path / "runs", backend=backend, listener=watcher)
    assert watcher.killed
    resumed = [p.resumed for cell, p in watcher.news if cell == LONGEST]
    assert resumed[0] == 0 < resumed[-1]
    assert f"{LONGEST.label}: its worker was lost; node" in caplog.text
    assert sorted(cell.label for cell in watcher.ends) == sorted(cell.label for cell in CELLS)
    assert_like_alone(CELLS, outcomes, alone)
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 12


def test_a_cell_that_ray_leaves_on_a_dead_node_is_started_again(
    address: str,
    alone: dict[Cell, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a cut link Ray itself needs five minutes; here the node only seems to be dead."""
    launched = []

    class Backend(OnRay):
        def _launch(self, ticket: int) -> None:
            launched.append(ticket)
            if len(launched) == 2:  # the node is well again
                monkeypatch.undo()
                self._dead.clear()
            super()._launch(ticket)

    class Cutter(Watcher):
        def update(self, cell: Cell, progress: Progress) -> None:
            if not self.news:
                nodes = [{**node, "Alive": False} for node in ray.nodes()]
                monkeypatch.setattr(ray_backend, "LOST_SECONDS", 0.0)
                monkeypatch.setattr(ray, "nodes", lambda: nodes)
            super().update(cell, progress)

    watcher = Cutter()
    backend = Backend(tmp_path / "runs", address, checkpoint_seconds=0)
    outcomes = run_grid([LONGEST], tmp_path / "runs", backend=backend, listener=watcher)
    assert launched == [1, 1]
    assert f"{LONGEST.label}: its worker was lost; node" in caplog.text
    assert watcher.news[-1][1].resumed > 0
    assert_like_alone([LONGEST], outcomes, alone)


def test_a_url_instead_of_a_shared_folder(
    address: str, alone: dict[Cell, Path], tmp_path: Path
) -> None:
    """Stopped in the middle and resumed on a machine that has nothing but the URL."""
    url = f"file://{tmp_path}/bucket/runs"
    cells = [cell for cell in CELLS if cell.seed == LONGEST.seed]

    class Stopper(Watcher):
        def update(self, cell: Cell, progress: Progress) -> None:
            if cell == LONGEST:
                os.kill(os.getpid(), signal.SIGINT)

    first = OnRay(tmp_path / "first", address, url, checkpoint_seconds=1e9)
    with pytest.raises(KeyboardInterrupt):
        run_grid(cells, tmp_path / "first", backend=first, listener=Stopper())
    bucket = tmp_path / "bucket" / "runs"
    (checkpoint,) = bucket.glob("*moetta*/checkpoint/progress.json")
    assert 0 < json.loads(checkpoint.read_text())["step"] < 400
    watcher = Watcher()
    second = OnRay(tmp_path / "second", address, url)
    outcomes = run_grid(cells, tmp_path / "second", backend=second, listener=watcher)
    assert_like_alone(cells, outcomes, alone)
    assert next(p.resumed for c, p in watcher.news if c == LONGEST) > 0
    for cell in cells:
        assert_same(bucket / alone[cell].name, alone[cell])
    again = OnRay(tmp_path / "third", address, url)
    assert_like_alone(cells, run_grid(cells, tmp_path / "third", backend=again), alone)


def test_what_the_nodes_lack_is_said_before_anything_starts(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = CELLS[1]

    def prepare(*cells: Cell, root: Path = tmp_path / "runs", store: str | None = None) -> None:
        OnRay(root, address, store).prepare(cells)

    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*file/runs cannot be written to"):
        prepare(cell, root=tmp_path / "file" / "runs")
    with pytest.raises(ValueError, match=r"memory://runs is not shared .* with --store"):
        prepare(cell, store="memory://runs")
    with pytest.raises(ValueError, match="cannot be used to store runs"):
        prepare(cell, store="nonsense://runs")
    with pytest.raises(ValueError, match=r"there is no weights file .*absent"):
        prepare(replace(cell, weights=str(tmp_path / "absent.safetensors")))
    with pytest.raises(ValueError, match=r"a run asks for 64 CPUs .* the largest has 2 CPUs"):
        prepare(replace(cell, threads=64))
    with pytest.raises(ValueError, match="--device is cpu, cuda or mps, got 'cuda:1'"):
        prepare(replace(cell, device="cuda:1"))
    monkeypatch.setattr(moetta, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"has moetta .* but this command is of 0\.0\.1"):
        prepare(cell)
    assert not (tmp_path / "runs").exists()


def test_the_command_is_killed_then_stopped_then_finished(address: str, tmp_path: Path) -> None:
    """On a cluster that stays; the last time from another process, with the same results."""
    out = tmp_path / "runs"
    arguments = command(out, *GRID, "--limit", "800", "--checkpoint-seconds", "0", "--ray", address)
    process = start(arguments)
    wait_for(process, "progress")
    process.kill()
    process.communicate(timeout=LONG)
    process = start(arguments)
    wait_for(process, "progress", resumed=True)
    assert_stopped(process, signal.SIGINT, out)
    fields = {**COMMON, "batch_size": 4, "limit": 800, "threads": 1}
    cells = make_grid(method=["tent", "moetta"], **fields)
    watcher = Watcher()
    outcomes = run_grid(cells, out, backend=OnRay(out, address), listener=watcher)
    assert any(progress.resumed for _, progress in watcher.news)
    alone = run_grid(cells, tmp_path / "alone")
    folders = {c: o.folder for c, o in zip(cells, alone, strict=True) if o.folder is not None}
    assert_like_alone(cells, outcomes, folders)


def test_sigterm_to_all_processes_also_those_of_its_own_ray(tmp_path: Path) -> None:
    """As a cluster's scheduler sends it."""
    process = start(command(tmp_path / "runs", *GRID, "--limit", "4000", "--ray"))
    wait_for(process, "progress")
    assert ray_processes(process.pid)
    assert_stopped(process, signal.SIGTERM, tmp_path / "runs")
    assert not ray_processes(process.pid)


def assert_stopped(process: subprocess.Popen[str], number: int, runs: Path) -> None:
    """A signal to all processes of a command ends it in order, with checkpoints."""
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["event"] == "stopped"
    assert list(runs.glob("*/checkpoint/progress.json"))


def test_a_ray_of_its_own_does_not_outlive_a_killed_command(tmp_path: Path) -> None:
    process = start(command(tmp_path / "runs", *GRID, "--limit", "4000", "--ray"))
    wait_for(process, "begin")
    assert ray_processes(process.pid)
    process.kill()
    process.communicate(timeout=LONG)
    deadline = time.monotonic() + 60
    while ray_processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not ray_processes(process.pid)


def test_sigterm_while_source_images_are_read(address: str, tmp_path: Path) -> None:
    for i in range(2):
        folder = tmp_path / "photos" / "ab"[i]
        folder.mkdir(parents=True)
        for j in range(32):
            Image.new("RGB", (32, 32), (i * 99, j, 0)).save(folder / f"{j}.png")
    log = tmp_path / "log"
    photos = str(tmp_path / "photos")
    options = ["--stream", photos, "--source", photos, "--method", "eata", "--ray", address]
    arguments = command(tmp_path / "runs", *options, model="slow_models:vit")
    (tmp_path / "slow_log").write_text(str(log))
    process = start(arguments, cwd=tmp_path)  # where the slow model finds the log's name
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
