"""The examples run as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moetta.testing import check_method

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_example(path):
    if path.stem == "huggingface":
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_method_in_one_short_file_keeps_every_promise(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    outcomes = check_method("own_method:PseudoLabel", lr=0.01, confidence=0.2)
    assert len(outcomes) > 100
    assert not any(outcome.refused for outcome in outcomes)
    assert len((FOLDER / "own_method.py").read_text().splitlines()) < 60


def test_a_method_outside_the_package_runs_by_its_path(tmp_path):
    command = [sys.executable, "-m", "moetta", "run", "--method", "own_method:PseudoLabel"]
    command += ["--model", "digits-vit", "--stream", "classical", "--limit", "256"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert [summary["samples"] for summary in summaries] == [256]
    assert 0 < summaries[0]["cost"]["selected"] < 256
