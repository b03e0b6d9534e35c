"""The commands that write corrupted images and train models, as users call them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from moetta.commands.main import main
from moetta.data import Preprocess, image_folder


def test_corrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "photos", tmp_path / "c"
    for name in ("cat", "dog"):
        (source / name).mkdir(parents=True)
        ramp = np.linspace(0, 255, 40 * 50 * 3).reshape(40, 50, 3)
        Image.fromarray(ramp.astype(np.uint8)).save(source / name / "0.png")
    (source / "dog" / "1.jpg").write_bytes(b"not an image")
    options = ["--only", "fog", "contrast", "fog", "--severity", "5", "--size", "32"]
    command = ["corrupt", str(source), str(target), *options, "--workers", "1"]
    first = subprocess.run(
        [sys.executable, "-m", "moetta", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert first.returncode == 0, first.stderr
    assert "1.jpg" in first.stderr
    assert "4 written, 0 already there, 1 images skipped" in first.stderr
    assert "100%" not in first.stderr  # an image was skipped
    assert first.stderr.count("skipped: ") == 1
    assert first.stdout == ""
    domain = image_folder(target / "fog" / "5", Preprocess((0.5,) * 3, (0.5,) * 3))
    assert domain.labels.tolist() == [0, 1]
    assert main(command) == 0
    assert "0 written, 4 already there, 1 images skipped" in capsys.readouterr().err
    (source / "dog" / "1.jpg").rename(tmp_path / "broken.jpg")
    assert main([*command[:2], str(tmp_path / "whole"), *command[3:]]) == 0
    assert "4/4 files (100%), about 0 s left" in capsys.readouterr().err
    (tmp_path / "broken.jpg").rename(source / "dog" / "1.jpg")
    assert main([*command, "--on-error", "fail"]) == 1
    assert "1.jpg" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is incomplete"):
        image_folder(target / "fog" / "5", Preprocess((0.5,) * 3, (0.5,) * 3))


def test_train_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-model", "digits-vit", "--steps", "2", "--out", str(tmp_path)]) == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["digits-vit.json", "digits-vit.safetensors"]
    card = json.loads((tmp_path / "digits-vit.json").read_text())
    assert card["recipe"]["steps"] == len(card["first_losses"]) == 2
    weights = load_file(tmp_path / "digits-vit.safetensors")
    assert sum(w.size for w in weights.values()) == card["parameters"]
    out = tmp_path / "no"
    assert main(["train-model", "cifar-vit", "--data", str(tmp_path), "--out", str(out)]) == 1
    assert "expected test/<class>" in capsys.readouterr().err
    assert not out.exists()


def test_the_old_name_of_train_model_gets_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-source", "digits-vit"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moetta: no command 'train-source'; did you mean 'train-model'")
