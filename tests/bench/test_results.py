"""Reading results back: over seeds, and past broken files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from moetta.bench.results import aggregate, load_run, load_runs
from moetta.bench.show import records


def make(
    root: Path,
    name: str,
    accuracy: float,
    seed: int,
    method: str = "tent",
    collapsed: bool = False,
    **protocol: Any,
) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    stream = {"stream": "s", "seed": seed, "limit": None, "domains": []}
    card = {
        "schema": 1,
        "method": method,
        "variant": None,
        "config": {"seed": seed, "lr": 1e-3},
        "seed": seed,
        "protocol": {"model": {"name": "m"}, "stream": {**stream, **protocol}},
    }
    summary = {
        "schema": 1,
        "accuracy": accuracy,
        "collapsed": collapsed,
        "samples": 10,
        "cost": {"time_ratio": 2.0},
    }
    (folder / "card.json").write_text(json.dumps(card))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_seeds_together(tmp_path: Path) -> None:
    for seed, accuracy in ((42, 0.5), (4242, 0.6), (424242, 0.1)):
        make(tmp_path, f"tent{seed}", accuracy, seed, collapsed=accuracy < 0.2)
        make(tmp_path, f"noadapt{seed}", 0.4, seed, method="noadapt")
    runs, problems = load_runs([tmp_path])
    assert problems == []
    tent = next(g for g in aggregate(runs) if g.first.method == "tent")
    assert tent.mean == pytest.approx(40)
    assert tent.sd == pytest.approx(statistics.stdev([50, 60, 10]))
    assert tent.worst == pytest.approx(10)
    assert tent.collapses == 1
    record = next(r for r in records(runs) if r["method"] == "tent")
    assert record["gain"] == pytest.approx(0)
    assert record["seeds"] == 3
    assert record["time"] == 2


def test_one_seed_has_no_sd(tmp_path: Path) -> None:
    (group,) = aggregate([load_run(make(tmp_path, "a", 0.5, 1))])
    assert group.sd is None


def test_other_protocols_are_not_mixed(tmp_path: Path) -> None:
    make(tmp_path, "a", 0.5, 1)
    make(tmp_path, "b", 0.6, 2, batch_size=1)
    runs, _ = load_runs([tmp_path])
    assert len(aggregate(runs)) == 2


def test_subsets_of_one_size_are_one_protocol(tmp_path: Path) -> None:
    for seed in (1, 2):
        make(tmp_path, f"r{seed}", 0.5, seed, limit=9, domains=[{"name": "a", "samples": seed}])
    runs, _ = load_runs([tmp_path])
    assert len(aggregate(runs)) == 1


def test_broken_files_are_named_and_the_rest_shown(tmp_path: Path) -> None:
    make(tmp_path, "good", 0.5, 1)
    (make(tmp_path, "broken", 0.5, 2) / "summary.json").write_text("{")
    (make(tmp_path, "future", 0.5, 3) / "card.json").write_text('{"schema": 99}')
    (make(tmp_path, "unfinished", 0.5, 4) / "summary.json").unlink()
    (make(tmp_path, "stray", 0.5, 5) / "card.json").unlink()
    (make(tmp_path, "odd", 0.5, 6) / "card.json").write_text('{"schema": 1}')
    runs, problems = load_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    for name in ("broken", "future", "unfinished", "stray", "odd"):
        assert sum(f"/{name}" in problem for problem in problems) == 1, name


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no results folder"):
        load_runs([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match="no finished run"):
        load_run(tmp_path)
