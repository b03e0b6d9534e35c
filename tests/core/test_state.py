"""Saving, loading, snapshots: bit for bit, whole or not at all, and never the wrong file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moetta
from helpers.models import VIT, images, small_vit
from helpers.resume import FIRST, SECOND
from helpers.trials import LEARNS_NOTHING, METHODS, ON_A_VIT, assert_same, make
from moetta.core import state

LEARNERS = [m for m in METHODS if m not in LEARNS_NOTHING]
every = pytest.mark.parametrize("method", METHODS)


def in_a_fresh_process(folder: Path, task: str) -> int:
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(tests / "helpers" / "resume.py"), str(folder), task]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=environment, check=False, timeout=240).returncode


def test_a_fresh_process_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    expected = {}
    for method in ON_A_VIT:
        adapter = make(method)
        for seed in FIRST:
            adapter(images(4, seed))
        adapter.save(tmp_path / f"{method}.safetensors")
        expected[method] = {str(seed): adapter(images(4, seed)) for seed in SECOND}
    assert in_a_fresh_process(tmp_path, "continue") == 0
    for method in ON_A_VIT:
        assert_same(load_file(tmp_path / f"{method}.logits"), expected[method])


def test_a_process_killed_while_saving_leaves_the_old_file(tmp_path: Path) -> None:
    path, adapter = tmp_path / "tent.safetensors", make("tent")
    for seed in range(3):
        adapter(images(4, seed))
    adapter.save(path)
    before = path.read_bytes()
    assert in_a_fresh_process(tmp_path, "die") == -signal.SIGKILL
    assert path.read_bytes() == before
    other = make("tent")
    other.load(path)
    assert_same(other.state_dict(), adapter.state_dict())


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, adapter = tmp_path / "state.safetensors", make("tent")
    adapter.save(path)
    before = path.read_bytes()
    adapter(images(4))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        adapter.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        make("tent").save(tmp_path / "nowhere" / "state.safetensors")


@every
def test_a_loaded_state_is_the_saved_one(method: str, tmp_path: Path) -> None:
    adapter = make(method)
    for seed in range(3):
        adapter(images(4, seed))
    adapter.save(tmp_path / "a")
    other = make(method)
    other(images(4, 9))
    other.load(tmp_path / "a")
    assert_same(other.state_dict(), adapter.state_dict())
    assert other.totals == adapter.totals
    assert_same(other(images(4, 5)), adapter(images(4, 5)))


@every
def test_rollback_returns_to_the_snapshot(method: str) -> None:
    adapter = make(method)
    with pytest.raises(
        RuntimeError, match=r"no snapshot to roll back to; call adapter.snapshot\(\)"
    ):
        adapter.rollback()
    adapter(images(4, 0))
    adapter.snapshot()
    kept, totals = adapter.state_dict(), adapter.totals
    expected = [adapter(images(4, seed)) for seed in (1, 2)]
    for _ in range(2):  # a snapshot serves more than once
        adapter.rollback()
        assert_same(adapter.state_dict(), kept)
        assert adapter.totals == totals
        for seed, logits in zip((1, 2), expected, strict=True):
            assert_same(adapter(images(4, seed)), logits)
    adapter.reset()
    adapter.rollback()
    assert_same(adapter.state_dict(), kept)


@every
def test_a_state_dict_is_a_copy_of_tensors_only(method: str) -> None:
    adapter = make(method)
    adapter(images(4, 0))
    held = adapter.state_dict()
    kept = {k: v.clone() for k, v in held.items()}
    adapter(images(4, 1))
    assert_same(held, kept)
    for tensor in held.values():
        assert not tensor.requires_grad
        tensor.fill_(0)
    adapter.load_state_dict(kept)
    for tensor in kept.values():
        tensor.fill_(0)  # neither may a state that was loaded be held on to
    assert adapter.state_dict().keys() == kept.keys()
    assert adapter.totals.samples == 4


@every
def test_paused_predicts_without_learning(method: str) -> None:
    adapter = make(method)
    adapter(images(4, 0))
    before = adapter.state_dict()
    with adapter.paused() as same:
        assert same is adapter
        with adapter.paused():
            first = adapter(images(4, 1))
        second = adapter(images(4, 1))
    assert_same(first, second)
    assert adapter.last is not None
    assert adapter.last.skipped == "paused"
    after = adapter.state_dict()
    assert adapter.totals.skipped == 2
    for key in before:
        if key != "counters":
            assert_same(before[key], after[key])
    assert_same(adapter(images(4, 1)), first)  # the logits that are scored come before the step
    assert adapter.last.skipped is None


def test_paused_ends_also_after_a_failure() -> None:
    adapter = make("tent")
    with pytest.raises(ValueError, match="empty"), adapter.paused():
        adapter(torch.empty(0, 3, 16, 16))
    adapter(images(4))
    assert adapter.last is not None
    assert adapter.last.skipped is None


# --- what is refused ------------------------------------------------------------------------------


def refuses(adapter: moetta.Adapter, path: Path, message: str) -> None:
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=message):
        adapter.load(path)
    assert_same(before, adapter.state_dict())


@every
def test_damaged_and_foreign_files_are_refused(method: str, tmp_path: Path) -> None:
    adapter, path = make(method), tmp_path / "state"
    adapter(images(4, 0))
    adapter.save(path)
    whole = path.read_bytes()
    adapter(images(4, 1))
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuses(adapter, path, "damaged or not a safetensors file")
    path.write_bytes(b"PK\x03\x04" + whole)
    refuses(adapter, path, "damaged or not a safetensors file")
    save_file({"weight": torch.zeros(2)}, path)
    refuses(adapter, path, "not a state saved by moetta")
    save_file({"weight": torch.zeros(2)}, path, {"format": state.FORMAT, "version": "99"})
    refuses(adapter, path, "state version 99; this moetta reads 1")
    own = {"format": state.FORMAT, "version": state.VERSION}
    save_file({"weight": torch.zeros(2)}, path, own)
    refuses(adapter, path, "does not say its method and config and model")
    own |= {"method": method, "config": "{", "model": ""}
    save_file({"weight": torch.zeros(2)}, path, own)
    refuses(adapter, path, "configuration that cannot be read")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        adapter.load(tmp_path / "missing")


@every
def test_states_of_others_are_refused(method: str, tmp_path: Path) -> None:
    adapter, path = make(method), tmp_path / "state"
    other = "sar" if method != "sar" else "tent"
    make(other).save(path)
    refuses(adapter, path, f"saved by method '{other}', this adapter is '{method}'")
    make(method, seed=7).save(path)
    refuses(adapter, path, "another configuration: seed: file 7, here 0")
    make(method, model=small_vit(seed=3)).save(path)
    refuses(adapter, path, r"other source weights \(file [0-9a-f]{12}, here [0-9a-f]{12}\)")


def test_one_changed_frozen_weight_is_noticed(tmp_path: Path) -> None:
    model = VIT.model()
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-3
    make("tent", model=model).save(tmp_path / "state")
    refuses(make("tent"), tmp_path / "state", "other source weights")


@pytest.mark.parametrize("method", LEARNERS)
def test_a_state_dict_that_does_not_fit_is_refused(method: str) -> None:
    donor = make(method)
    donor(images(4, 0))
    good = donor.state_dict()
    adapter = make(method)
    before = adapter.state_dict()
    param = next(k for k in good if k.startswith("param."))
    cases = [
        ({k: v for k, v in good.items() if k != param}, f"{param} is missing"),
        ({**good, param: good[param].double()}, f"{param} is float64"),
        ({**good, param: good[param].flatten()[:1]}, rf"{param} is float32 \(1,\), here"),
        ({**good, "param.nothing": torch.zeros(1)}, "param.nothing is unknown here"),
        ({**good, "running.nothing": torch.zeros(1)}, "running.nothing is unknown here"),
        ({**good, "optim.nothing.step": torch.zeros(1)}, "optim.nothing.step is unknown here"),
        ({k: v for k, v in good.items() if k != "counters"}, "counters is missing"),
        ({**good, "counters": torch.zeros(3).double()}, "counters is float64"),
        ({**good, param: 3}, f"{param} is not a tensor"),
        ({}, r"is missing.*\(and \d+ more\)"),
    ]
    momentum = [k for k in good if k.startswith("optim.") and not k.endswith(".step")]
    if momentum:  # a new adapter has none to compare with, but knows what it belongs to
        cases.append(({**good, momentum[0]: torch.zeros(3, 3, 3)}, rf"{momentum[0]} is float32"))
    for name in adapter.from_source[:1]:
        key = f"running.{name}"
        cases.append(({k: v for k, v in good.items() if k != key}, f"{key} is missing"))
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            adapter.load_state_dict(tensors)
        assert_same(before, adapter.state_dict())
    adapter.load_state_dict(good)
    assert_same(good, adapter.state_dict())


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "state"
    make("tent").save(path)
    (tmp_path / "plain").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
