"""The commands as users call them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from moetta.bench.cell import Cell
from moetta.commands.doctor import Finding
from moetta.commands.main import COMMANDS, main
from moetta.commands.options import expand_methods
from moetta.methods import list_methods
from moetta.paper.published import METHODS

TINY = Path(__file__).parents[1] / "bench"
MODEL = "tiny_models:vit"


@pytest.fixture(autouse=True)
def _find_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TINY))


def run_tiny(out: Path, *more: str) -> int:
    small = ["--limit", "64", "--batch-size", "16", "--threads", "1"]
    return main(
        ["run", "--model", MODEL, "--stream", "classical", *small, "--out", str(out), *more]
    )


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"moetta {command}" in text
    assert "default" in text


def test_run_then_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    assert run_tiny(out, "--method", "noadapt", "tent", "--seeds", "1", "2") == 0
    assert "tent" in capsys.readouterr().out
    assert main(["results", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["method"], row["seeds"]) for row in rows} == {("noadapt", 2), ("tent", 2)}
    assert main(["results", str(out), "--filter", "method=tent", "--sort", "time"]) == 0
    shown = capsys.readouterr().out
    assert "tent" in shown
    assert "noadapt  " not in shown
    assert main(["results", str(out), "--by-domain"]) == 0
    assert "c/gaussian_noise" in capsys.readouterr().out


def test_results_with_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(tmp_path, "--method", "noadapt", "tent") == 0
    broken = next(tmp_path.glob("*tent*/summary.json"))
    broken.write_text("{")
    capsys.readouterr()
    assert main(["results", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "noadapt" in output.out
    assert f"{broken.parent}: summary.json could not be read" in output.err


def test_set_changes_the_configuration(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, "--method", "noadapt", "moetta", "--set", "lr=0.5", "experts=3") == 0
    (folder,) = tmp_path.glob("*moetta*")
    card = json.loads((folder / "card.json").read_text())
    assert (card["config"]["lr"], card["config"]["experts"]) == (0.5, 3)
    assert card["variant"] == "lr=0.5,experts=3"


def test_groups_of_methods() -> None:
    known = list_methods()
    assert expand_methods(["tent", "all"])[0] == "tent"
    assert set(expand_methods(["all"])) == set(known)
    assert expand_methods(["paper"]) == list(METHODS)
    for group in {method.group for method in known.values()}:
        members = [name for name, method in known.items() if method.group == group]
        assert expand_methods([group, *members]) == members
    assert expand_methods(["package.module:Class"]) == ["package.module:Class"]


OWN = '''
from dataclasses import dataclass
from moetta.methods import register
from moetta.methods.tent import Tent, TentConfig

@dataclass(frozen=True)
class Config(TentConfig):
    """Mine."""

@register("mine", Config, title="Mine", summary="my method", group="entropy")
class Mine(Tent):
    """Tent under another name."""
'''


def test_a_method_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_tent.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):  # the second time it is recognised
        assert run_tiny(tmp_path / "runs", "--method", "own_tent:Mine", "noadapt") == 0
    assert "mine" in capsys.readouterr().out.lower()
    (card,) = (tmp_path / "runs").glob("*__mine__*/card.json")
    assert json.loads(card.read_text())["title"] == "Mine"


def test_what_failed_does_not_hide_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--model", MODEL, "tiny_models:no_model", "--stream", "classical"]
    page = tmp_path / "page.html"
    arguments += ["--limit", "32", "--out", str(tmp_path), "--report", str(page)]
    assert main([*arguments, "--method", "tent"]) == 1
    output = capsys.readouterr()
    assert "embedded-classical, 32 images" in output.out
    assert "1 of 2 runs failed\ntent classical tiny_models:no_model s42" in output.err
    assert page.exists()


def test_json_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(tmp_path, "--method", "tent", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("begin", "end")
    assert events[-1]["summary"]["samples"] == 64
    assert Path(events[-1]["folder"]).is_dir()


def test_own_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of class folders, and a mixture that corrupts it; a model that says nothing."""
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(6):
            noise = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(tmp_path / "pets" / name / f"{i}.png")
    mixture = 'batch_size = 8\n[[domain]]\nfolder = "pets"\n[[domain]]\nfolder = "pets"\n'
    (tmp_path / "mix.toml").write_text(mixture + 'corruption = "fog"\n')
    own = ["run", "--model", MODEL, "--out", str(tmp_path / "runs")]
    own += ["--stream", str(tmp_path / "pets"), str(tmp_path / "mix.toml")]
    assert main(own) == 1
    assert "--mean" in capsys.readouterr().err
    own += ["--size", "32", "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"]
    assert main([*own, "--method", "eata"]) == 1
    assert "--source FOLDER" in capsys.readouterr().err
    source = ["--source", str(tmp_path / "pets"), "--source-images", "8"]
    assert main([*own, "--method", "tent", "eata", *source]) == 0
    found = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.rglob("card.json")}
    streams = [card["protocol"]["stream"] for card in found.values() if card["method"] == "eata"]
    assert sorted((s["samples"], s["batch_size"]) for s in streams) == [(12, 64), (24, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "moeta"], "did you mean 'moetta'"),
        (["--set", "expert=3"], "did you mean 'experts'"),
        (["--stream", "potpouri"], "did you mean 'potpourri"),
        (["--model", "digits-vitt"], "did you mean 'digits-vit'"),
        (["--data", "nowhere"], "no data folder nowhere"),
        (["--device", "cdua"], "valid: cpu, cuda, mps"),
        (["--weights", "nope.safetensors"], "no weights file nope.safetensors"),
        (["--workers", "0"], "workers must be at least 1"),
        (["--mean", "0", "0", "0"], "--mean and --std together"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tiny(tmp_path / "out", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/summary.json"))


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['polars'] = None\n"
    code += "from moetta.commands.main import main; main(['run'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("moetta run: this command needs polars")
    assert "pip install 'moetta[bench]'" in done.stderr


def test_models_and_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "--json"]) == 0
    assert "digits-vit" in [row["model"] for row in json.loads(capsys.readouterr().out)]
    assert main(["doctor", "--json", "--data", str(tmp_path)]) == 0
    found = {f["topic"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["self-test"]["good"]
    assert "imagenet" in found["imagenet-val"]["text"].lower()


def test_doctor_shows_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetta.commands.doctor.PACKAGES", ("no-such-package",))
    monkeypatch.setattr(
        "moetta.commands.doctor._self_test", lambda: Finding("self-test", True, "[x]")
    )
    assert main(["doctor"]) == 0
    assert "pip install 'moetta[bench]'" in capsys.readouterr().out


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", MODEL, "--limit", "64", "--out", str(tmp_path / "d")]
    assert main([*arguments, "--stream", "classical", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    for method in ("noadapt", "tent", "eata", "cotta", "sar", "deyo", "mgtta", "becotta", "moetta"):
        assert method in shown
    assert (tmp_path / "d" / "report.html").stat().st_size > 1000


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Cell] = []

    def refuse(cells: list[Cell], *_: object, **__: object) -> None:
        seen.extend(cells)
        raise ValueError("seen enough")

    monkeypatch.setattr("moetta.commands.options.run_grid", refuse)
    assert main(["demo", "--loaders", "2", "--threads", "3"]) == 1
    assert {(cell.loaders, cell.threads) for cell in seen} == {(2, 3)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_the_command_resumes(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moetta", "run", "--model", MODEL, "--method", "moetta"]
    command += ["--stream", "classical", "--limit", "1200", "--batch-size", "4", "--threads", "1"]
    command += ["--json", "--out", str(tmp_path)]
    path = os.pathsep.join([str(TINY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "begin"
    assert json.loads(process.stdout.readline())["event"] == "progress"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["resume"] == "run the same command again"
    assert "Traceback" not in err
    (checkpoint,) = tmp_path.glob("*/checkpoint/progress.json")
    step = json.loads(checkpoint.read_text())["step"]
    assert 0 < step < 300
    assert main(command[3:]) == 0
    (summary,) = tmp_path.glob("*/summary.json")
    assert json.loads(summary.read_text())["samples"] == 1200
