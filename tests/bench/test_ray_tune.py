"""Early stopping: poor settings lose the race, and leave nothing that looks like a result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_ray import Watcher
from test_resume import assert_same

from moetta.bench import Cell, run_grid
from moetta.bench.progress import Progress
from moetta.results.runs import load_runs

pytest.importorskip("ray")
from moetta.bench.ray_tune import EarlyStopping

# With the huge rates tent collapses at once.
BASE = Cell("tent", "classical", "digits-vit", seed=1, limit=160, batch_size=16, threads=1)
RATES = [replace(BASE, variant=f"lr={r:g}", overrides=(("lr", r),)) for r in (1e-5, 3.0, 9.0, 30.0)]
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_the_poor_are_stopped_and_the_others_are_as_without(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noadapt = replace(BASE, method="noadapt")
    cells, watcher = [noadapt, *RATES], Watcher()
    backend = EarlyStopping(tmp_path / "runs", address)
    outcomes = run_grid(cells, tmp_path / "runs", backend=backend, listener=watcher)
    assert [o.error for o in outcomes] == [None] * 5
    stopped = [c for c, o in zip(cells, outcomes, strict=True) if o.stopped]
    finished = [c for c, o in zip(cells, outcomes, strict=True) if o.folder]
    assert set(stopped) <= set(RATES[1:])
    assert stopped
    assert len(stopped) + len(finished) == 5
    assert noadapt in finished
    assert capsys.readouterr().out == ""  # where the display's JSON goes
    assert {c for c, _ in watcher.news} & set(RATES)  # one that is stopped at once says nothing
    for outcome in outcomes:
        if outcome.stopped:
            assert outcome.stopped.startswith("stopped early after ")
    runs, problems = load_runs([tmp_path / "runs"])
    assert len(runs) == len(finished)
    assert ["stopped early" in p.reason for p in problems] == [True] * len(stopped)
    # The same command does not run them again; without early stopping they are finished.
    again = EarlyStopping(tmp_path / "runs", address)
    second = run_grid(cells, tmp_path / "runs", backend=again)
    assert [bool(o.stopped) for o in second] == [bool(o.stopped) for o in outcomes]
    whole, alone = run_grid(cells, tmp_path / "runs"), run_grid(cells, tmp_path / "alone")
    for one, other in zip(whole, alone, strict=True):
        assert one.folder is not None
        assert other.folder is not None
        assert_same(one.folder, other.folder)


def test_stopped_by_the_user(address: str, tmp_path: Path) -> None:
    class Stopper(Watcher):
        def update(self, cell: Cell, progress: Progress) -> None:
            if not self.news:
                os.kill(os.getpid(), signal.SIGTERM)
            super().update(cell, progress)

    backend = EarlyStopping(tmp_path, address)
    with pytest.raises(KeyboardInterrupt):
        run_grid(RATES, tmp_path, backend=backend, listener=Stopper())
    checkpoints = list(tmp_path.glob("*/checkpoint/progress.json"))
    assert checkpoints
    assert all(json.loads(path.read_text())["step"] > 0 for path in checkpoints)
    assert not list(tmp_path.glob("*/checkpoint/early-stop.json"))
    assert not list(tmp_path.glob("*/summary.json"))
