from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.cells import one_cell, random_mgg
from moetta.methods.mgtta import SHIPPED, convert
from moetta.nn.mgg import MGG, load_mgg

PREFIX = "seq_modeling_block."


def test_the_cells_are_what_the_definition_says_over_five_steps():
    mgg = random_mgg().double()
    p = mgg.state_dict()
    weight, bias = mgg.start(6)
    alone = [(p["W1"][0], p["b1"][0, 0]) for _ in range(6)]
    for step in range(5):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(6, 2, dtype=torch.float64, generator=g)
        u, weight, bias = mgg(x, weight, bias)
        for i in range(6):
            expected, *alone[i] = one_cell(p, x[i], *alone[i])
            torch.testing.assert_close(u[i], expected)
            torch.testing.assert_close(weight[i], alone[i][0])
            torch.testing.assert_close(bias[i], alone[i][1])
    assert (weight - p["W1"]).abs().max() > 1e-3, "the fast weights did not move"


def test_a_negative_inner_rate_stops_the_fast_weights():
    mgg = random_mgg()
    mgg.learnable_token_idx.fill_(-2.0)
    weight, bias = mgg.start(3)
    _, after, after_bias = mgg(torch.randn(3, 2), weight, bias)
    assert torch.equal(after, weight)
    assert torch.equal(after_bias, bias)


def test_the_start_is_the_authors():
    mgg = MGG(seed=1)
    assert sum(p.numel() for p in mgg.parameters()) == 164
    assert 0 < mgg.W1.std() < 0.03
    zeros = (mgg.b1, mgg.learnable_token_idx, mgg.learnable_ttt_lr_bias, mgg.ttt_norm_bias)
    assert all((z == 0).all() for z in zeros)
    assert (mgg.ttt_norm_weight == 1).all()
    assert mgg.q_proj.weight.abs().max() <= 2**-0.5
    assert not torch.equal(MGG(seed=2).W1, mgg.W1)


def authors_file(path: Path, state: dict[str, Tensor]) -> Path:
    torch.save({"model_state_dict": {PREFIX + k: v for k, v in state.items()}}, path)
    return path


def test_the_authors_layout_is_read_and_converted(tmp_path: Path):
    mgg = random_mgg(3)
    shapes = {k: tuple(v.shape) for k, v in mgg.state_dict().items()}
    assert shapes["learnable_ttt_lr_weight"] == (1, 1, 2)
    assert shapes["W1"] == (1, 8, 8)
    assert shapes["b1"] == (1, 1, 8)
    assert shapes["o_proj.weight"] == (1, 8)
    checkpoint = authors_file(tmp_path / "mgg_ckpt.pth", mgg.state_dict())
    convert(checkpoint, tmp_path / "mgg.safetensors")
    for path in (checkpoint, tmp_path / "mgg.safetensors"):
        loaded = load_mgg(path).state_dict()
        assert loaded.keys() == mgg.state_dict().keys()
        assert all(torch.equal(loaded[k], v) for k, v in mgg.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("W1"), "W1 is missing"),
        (lambda s: s.update(W2=torch.zeros(1)), "W2 is unknown"),
        (lambda s: s.update(b1=torch.zeros(8)), r"b1 has shape \(8,\), not \(1, 1, 8\)"),
        (lambda s: s["b1"].fill_(float("nan")), "b1 has NaN"),
    ],
)
def test_another_layout_is_refused_with_what_differs(tmp_path: Path, change, message: str):
    state = random_mgg().state_dict()
    change(state)
    checkpoint = authors_file(tmp_path / "other.pth", state)
    with pytest.raises(ValueError, match=message):
        convert(checkpoint, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path):
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="model_state_dict is missing"):
        load_mgg(tmp_path / "list.pth")
    with pytest.raises(ValueError, match="damaged"):
        load_mgg(tmp_path / "text.pth")
    with pytest.raises(ValueError, match="damaged"):
        load_mgg(tmp_path / "text.safetensors")
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        load_mgg(tmp_path / "absent.pth")


def test_the_shipped_generator_steps_against_the_gradient():
    mgg = load_mgg(SHIPPED)
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    u, _, _ = mgg(x, *mgg.start(2))
    assert u[0] > 0.5
    assert u[1] < -0.5


def test_the_shipped_generator_is_the_one_its_card_describes():
    card = json.loads(SHIPPED.with_suffix(".json").read_text())
    assert hashlib.sha256(SHIPPED.read_bytes()).hexdigest() == card["sha256"]


@pytest.mark.skipif(
    "MOETTA_MGG_CKPT" not in os.environ, reason="set it to the authors' mgg_ckpt.pth"
)
def test_the_authors_generator_gives_the_known_answers():
    mgg = load_mgg(os.environ["MOETTA_MGG_CKPT"])
    x = torch.tensor([[1, 1], [-1, -1], [3, 3], [0.3, 0.3], [0, 0], [1, -1]], dtype=torch.float32)
    known = torch.tensor([0.997994, -0.999695, 0.999061, 0.999428, -0.996125, 0.977382])
    u, _, _ = mgg(x, *mgg.start(6))
    torch.testing.assert_close(u, known, rtol=0, atol=5e-6)
