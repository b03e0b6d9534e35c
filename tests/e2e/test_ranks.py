"""`torchrun -m moetta run`: the same results as one process, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from moetta.bench import Cell, run_grid

TESTS = Path(__file__).parents[1]
CELL = Cell("moetta", "classical", "tiny_models:vit", limit=605, batch_size=10, threads=1)
TIMES = ("seconds", "seconds_noadapt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same cell, run in one process."""
    sys.path.insert(0, str(TESTS / "bench"))
    (outcome,) = run_grid([CELL], tmp_path_factory.mktemp("alone"))
    assert outcome.folder is not None, outcome.error
    return outcome.folder


def torchrun(out: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "moetta", "run", "--method", CELL.method]
    command += ["--stream", CELL.stream, "--model", CELL.model, "--limit", str(CELL.limit)]
    command += ["--batch-size", str(CELL.batch_size), "--threads", "1", "--out", str(out)]
    path = os.pathsep.join([str(TESTS / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [*command, "--checkpoint-seconds", "0.02", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def children(process: subprocess.Popen[str]) -> list[int]:
    """The ranks' process ids, in the order of the ranks."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks: dict[int, int] = {}
    for pid in map(int, pids):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                ranks[int(entry.removeprefix(b"RANK="))] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def ended(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """What a command printed until its end, which must come in time."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        for pid in children(process):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        raise


def step_of(out: Path) -> int:
    """The batch that the last checkpoint was written after; 0 without one."""
    for path in out.glob("*/checkpoint/progress.json"):
        return int(json.loads(path.read_text())["step"])
    return 0


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path, after: int = 0) -> None:
    limit = time.monotonic() + 120
    while step_of(out) <= after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.02)


def assert_equal(one: Path, many: Path) -> None:
    """Equal counts, and floats that differ by rounding only."""
    assert one.name == many.name
    assert {p.name for p in one.iterdir()} == {p.name for p in many.iterdir()}
    for file in one.glob("*.parquet"):
        a, b = pl.read_parquet(file), pl.read_parquet(many / file.name)
        timed = [c for c in TIMES if c in a.columns]
        assert_frame_equal(a.drop(timed), b.drop(timed), check_exact=False, abs_tol=1e-4)
    a, b = (json.loads((p / "summary.json").read_text()) for p in (one, many))
    for name in ("accuracy", "top5", "samples", "steps", "by_domain", "gain", "skipped_steps"):
        assert a[name] == b[name], name
    for name in ("forwards", "backwards", "selected", "skipped", "activated_parameters"):
        assert a["cost"][name] == b["cost"][name], name


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_stopped_then_killed_then_finished_by_more_ranks(alone: Path, tmp_path: Path) -> None:
    """Each time the same command resumes; in the end the results are those of one process."""
    process = torchrun(tmp_path, 2)
    wait_for_checkpoint(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    said = ended(process)
    # All ranks stop after the same batch: none waits for another that is gone.
    assert "stopped after 0 of 1 runs; the same command resumes where it stopped" in said
    assert "lost contact" not in said
    assert said.count("moetta run: stopped") == 1
    stopped = step_of(tmp_path)
    assert 0 < stopped < 61

    process = torchrun(tmp_path, 2)
    wait_for_checkpoint(process, tmp_path, stopped)
    begun = time.monotonic()
    os.kill(children(process)[1], signal.SIGKILL)
    said = ended(process)
    assert time.monotonic() - begun < 60
    assert process.returncode != 0
    assert "rank 0 of 2 lost contact with another rank" in said
    assert "the same command resumes from the last checkpoint" in said
    killed = step_of(tmp_path)
    assert stopped < killed < 61

    process = torchrun(tmp_path, 3, "--json")
    said = ended(process)
    assert process.returncode == 0, said
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [e["event"] for e in events if e["event"] != "progress"] == ["begin", "end"]
    assert {e["resumed"] for e in events if e["event"] == "progress"} == {killed}
    assert_equal(alone, tmp_path / alone.name)
    card = json.loads((tmp_path / alone.name / "card.json").read_text())
    assert card["ranks"] == 2  # as it was begun


def test_refusals_are_said_once_before_anything_starts(tmp_path: Path) -> None:
    process = torchrun(tmp_path / "runs", 2, "--seeds", "1", "2")
    said = ended(process)
    assert process.returncode != 0
    assert said.count("moetta run: torchrun started 2 ranks for 2 runs") == 1
    assert not (tmp_path / "runs").exists()
