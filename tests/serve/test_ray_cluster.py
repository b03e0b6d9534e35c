"""What is refused before anything starts on Ray."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moetta.commands.serve import Serve, make_deployment, make_settings
from moetta.serve.ray_cluster import Cluster, _within
from moetta.serve.ray_replica import hold


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be at least replicas=3, got 2"),
        ({"max_queued": 0}, "max_queued must be at least 1, got 0"),
    ],
)
def test_numbers_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**fields)


def test_what_hangs_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        _within(0.05, lambda: time.sleep(5))
    _within(5, lambda: 3)
    with pytest.raises(KeyError):
        _within(5, lambda: {}["missing"])


def deployment(**options: Any) -> Any:
    given = Serve(**{"ray": "local", "state_folder": Path("folder"), **options})
    return make_deployment(given, make_settings(given))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127\.0\.0\.1:1 \(.*refused\)"),
        ("ray://10.0.0.1:10001", "start moetta on a node of the cluster"),
    ],
)
def test_an_address_that_will_not_do_is_refused_at_once(address: str, message: str) -> None:
    pytest.importorskip("ray")
    found = deployment(ray=address)
    begun = time.monotonic()
    with pytest.raises((ValueError, ConnectionError), match=message):
        found.connect()
    assert time.monotonic() - begun < 20


def test_streams_need_a_fixed_number_of_replicas() -> None:
    with pytest.raises(ValueError, match="leave --max-replicas out"):
        deployment(state=Path("by-stream"), max_replicas=4)


def test_a_method_that_cannot_be_merged_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="moetta_plus cannot be merged: its running value"):
        deployment(state=Path("merged"), method="moetta_plus")
    assert deployment(state=Path("merged")).plan.policy == "merged"
    assert deployment(state=Path("by-stream"), method="moetta_plus").plan.policy == "by-stream"


def test_a_wrong_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="merge_every must be at least 1, got 0"):
        deployment(merge_every=0)


def test_what_state_means() -> None:
    assert Serve().folder == Path("moetta-state")
    assert Serve(state=Path("mine")).folder == Path("mine")
    assert Serve(state_folder=Path("merged")).folder == Path("merged")
    shared = Serve(ray="auto", state=Path("merged"), state_folder=Path("mine"))
    assert (shared.policy, shared.folder) == ("merged", Path("mine"))
    assert Serve(ray="auto", state=Path("mine")).policy == "per-replica"
    with pytest.raises(ValueError, match="needs --ray; for a folder of that name give --state-fo"):
        assert Serve(state=Path("merged")).folder
    with pytest.raises(ValueError, match="not by both"):
        assert Serve(state=Path("a"), state_folder=Path("b")).folder


def test_ray_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    from moetta.commands.main import main

    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--ray", "--state-folder", str(tmp_path), "--port", "0"]) == 1
    assert "pip install 'moetta[ray]'" in capsys.readouterr().err


def test_a_lock_is_held_by_one_and_free_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    first = hold(path, 0)
    with pytest.raises(TimeoutError, match="held by another replica"):
        hold(path, 0.3)
    assert path.read_text() == str(os.getpid())
    first.close()
    hold(path, 0).close()
