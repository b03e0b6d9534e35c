"""Reading results back: over seeds, and past broken files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from moetta.commands.main import main
from moetta.results import aggregate, load_run, load_runs, records


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
    assert tent.accuracy.mean == pytest.approx(40)
    assert tent.accuracy.sd == pytest.approx(statistics.stdev([50, 60, 10]))
    assert tent.accuracy.lowest == pytest.approx(10)
    assert tent.collapses == 1
    record = next(r for r in records(runs) if r["method"] == "tent")
    assert record["gain"] == pytest.approx(0)
    assert record["seeds"] == 3
    assert record["time"] == 2


def test_one_seed_has_no_sd(tmp_path: Path) -> None:
    (group,) = aggregate([load_run(make(tmp_path, "a", 0.5, 1))])
    assert group.accuracy.sd is None


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
    (make(tmp_path, "list", 0.5, 7) / "card.json").write_text("[]")
    runs, problems = load_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    for name in ("broken", "future", "unfinished", "stray", "odd", "list"):
        assert sum(problem.path.name == name for problem in problems) == 1, name


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("card", ["config"]),
        ("card", ["seed"]),
        ("card", ["protocol", "model", "name"]),
        ("card", ["protocol", "stream"]),
        ("summary", ["samples"]),
        ("summary", ["accuracy"]),
    ],
)
@pytest.mark.parametrize("value", [None, [1]])
def test_what_later_code_needs_is_checked(
    file: str, keys: list[str], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "good", 0.5, 1)
    path = make(tmp_path, "bad", 0.5, 2) / f"{file}.json"
    whole = json.loads(path.read_text())
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(whole))
    assert main(["results", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 1
    assert f"not shown: {path.parent}: {path.name} " in told.err
    assert keys[-1] in told.err


def test_a_run_counts_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs", "a", 0.5, 1)
    runs, problems = load_runs([tmp_path / "runs", folder, tmp_path / "runs" / ".." / "runs"])
    assert len(runs) == 1
    assert problems == []


def test_of_repeats_the_newest_counts(tmp_path: Path) -> None:
    for name, day, accuracy in (("old", 1, 0.1), ("new", 3, 0.9), ("middle", 2, 0.5)):
        path = make(tmp_path, name, accuracy, 1) / "card.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "created": f"2026-01-0{day}"}))
    make(tmp_path, "other-seed", 0.7, 2)
    runs, problems = load_runs([tmp_path])
    assert sorted(run.folder.name for run in runs) == ["new", "other-seed"]
    assert len(problems) == 2
    assert {p.path.name for p in problems} == {"old", "middle"}
    assert all(p.reason == "not counted: new repeats it" for p in problems)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; name"):
        load_runs([tmp_path / "nowhere"])
    (tmp_path / "runs").mkdir()
    for wrong in ("rnus", "rnus/demo"):
        with pytest.raises(FileNotFoundError, match=rf"did you mean {tmp_path}/runs\?"):
            load_runs([tmp_path / wrong])
    with pytest.raises(FileNotFoundError, match="does not hold a finished run"):
        load_run(tmp_path)
