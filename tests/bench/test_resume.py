"""A run that is killed and started again ends exactly like one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from PIL import Image
from polars.testing import assert_frame_equal
from safetensors.torch import load_file

from moetta.bench import Cell, run_grid
from moetta.bench.cell_run import run_cell
from moetta.data import image_folder

CELL = Cell("moetta", "classical", "tiny_models:vit", limit=256, batch_size=16, threads=1)
TIMES = ("seconds", "seconds_noadapt")


def finish(cell: Cell, root: Path, seconds: float = 1e9) -> Path:
    work = run_cell(cell, root, seconds)
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def assert_same(one: Path, other: Path) -> None:
    """Everything but times and memory is equal, to the bit."""
    assert one.name == other.name
    files = sorted(p.name for p in one.iterdir())
    assert files == sorted(p.name for p in other.iterdir())
    for name in files:
        if name.endswith(".parquet"):
            a, b = pl.read_parquet(one / name), pl.read_parquet(other / name)
            timed = [c for c in TIMES if c in a.columns]
            assert_frame_equal(a.drop(timed), b.drop(timed), check_exact=True)
        elif name.endswith(".safetensors"):
            a, b = load_file(one / name), load_file(other / name)
            assert a.keys() == b.keys()
            assert all(a[k].equal(b[k]) for k in a)
        else:
            a, b = (json.loads((p / name).read_text()) for p in (one, other))
            for key in ("seconds", "seconds_noadapt", "time_ratio", "peak_memory_bytes"):
                a.get("cost", {}).pop(key, None), b.get("cost", {}).pop(key, None)
            a.pop("created", None), b.pop("created", None)
            assert a == b


def test_a_run_in_progress_is_left_to_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moetta.bench.lock.LOCK_SECONDS", 0.5)
    cell = replace(CELL, limit=64)
    first = run_cell(cell, tmp_path)
    next(first)
    with pytest.raises(BlockingIOError, match="another command is running this cell"):
        next(run_cell(cell, tmp_path))
    assert "waiting up to" in caplog.text
    first.close()  # as a stopped command does; the lock goes with it
    folder = finish(cell, tmp_path)
    assert not (folder / "lock").exists()
    assert_same(folder, finish(cell, tmp_path / "undisturbed"))


@pytest.mark.parametrize("method", ["moetta", "eata", "cotta", "mgtta"])
def test_stopped_between_batches(method: str, tmp_path: Path) -> None:
    cell = replace(CELL, method=method, limit=96, source_images=32)
    whole = finish(cell, tmp_path / "whole")
    for stop in (1, 4):  # stopped twice: the second session resumes the first one's checkpoint
        work = run_cell(cell, tmp_path / "parts")
        steps = [next(work).step for _ in range(stop)]
        work.close()
    assert steps == [2, 3, 4, 5]
    parts = tmp_path / "parts" / whole.name
    assert (parts / "checkpoint" / "progress.json").exists()
    assert not (parts / "summary.json").exists()
    assert_same(whole, finish(cell, tmp_path / "parts"))
    assert not (parts / "checkpoint").exists()


SCRIPT = """
import sys, torch
from pathlib import Path
from moetta.bench.cell_run import run_cell
from test_resume import CELL
for news in run_cell(CELL, Path(sys.argv[1]), checkpoint_seconds=0.0):
    print(news.step, flush=True)
    if news.step == 9:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed(tmp_path: Path) -> None:
    """SIGKILL right after a batch whose checkpoint is on disk; then in the middle of one."""
    whole = finish(CELL, tmp_path / "whole")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "parts")]
    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert first.returncode == -signal.SIGKILL, first.stderr
    parts = tmp_path / "parts" / whole.name
    progress = json.loads((parts / "checkpoint" / "progress.json").read_text())
    assert progress["step"] == 9
    # A checkpoint that was being written when the process died must not matter.
    (parts / "checkpoint" / "adapter-10.safetensors").write_bytes(b"half a file")
    work = run_cell(CELL, tmp_path / "parts")
    news = next(work)
    assert (news.step, news.resumed) == (10, 9)
    work.close()
    assert_same(whole, finish(CELL, tmp_path / "parts"))


def test_damaged_checkpoint_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cell = replace(CELL, limit=64)
    whole = finish(cell, tmp_path / "whole")
    work = run_cell(cell, tmp_path / "parts")
    next(work)
    work.close()
    parts = tmp_path / "parts" / whole.name
    next((parts / "checkpoint").glob("adapter-*")).write_bytes(b"\0" * 64)
    assert_same(whole, finish(cell, tmp_path / "parts"))
    assert "starting this run anew" in caplog.text


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    cell = replace(CELL, limit=64)
    (first,) = run_grid([cell], tmp_path)
    assert first.folder is not None
    before = (first.folder / "summary.json").stat().st_mtime_ns
    time.sleep(0.01)
    (second,) = run_grid([cell], tmp_path)
    assert second == first
    assert (first.folder / "summary.json").stat().st_mtime_ns == before
    assert list(run_cell(cell, tmp_path)) == []


@pytest.mark.parametrize("resumed", [False, True])
def test_files_are_listed_once_per_run(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        (tmp_path / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (i, i, i)).save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png")
    cell = replace(CELL, stream=str(tmp_path / "photos"), limit=None, batch_size=2)
    cell = replace(cell, model="tiny_models:photo_model")
    if resumed:
        work = run_cell(cell, tmp_path / "runs")
        next(work)
        work.close()
    listed = []
    monkeypatch.setattr(
        "moetta.bench.protocol.image_folder",
        lambda *arguments: listed.append(arguments) or image_folder(*arguments),
    )
    finish(cell, tmp_path / "runs")
    assert len(listed) == 1


def test_a_run_with_a_damaged_summary_is_run_again(tmp_path: Path) -> None:
    cell = replace(CELL, limit=64)
    whole = finish(cell, tmp_path / "whole")
    broken = finish(cell, tmp_path / "broken")
    (broken / "summary.json").write_text("{")
    assert_same(whole, finish(cell, tmp_path / "broken"))


def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    cells = [replace(CELL, method=m, limit=64) for m in ("noadapt", "tent", "moetta")]
    alone = run_grid(cells, tmp_path / "alone")
    crew = run_grid(cells, tmp_path / "crew", workers=2)
    for one, other in zip(alone, crew, strict=True):
        assert one.folder is not None
        assert other.folder is not None
        assert_same(one.folder, other.folder)
