"""Replicas that learn by themselves, on a Ray of their own: more under load, and one that freezes.

The tests share one service and run in order: the last one stops it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import moetta
from serve.load import Load, replicas, until
from serve.poison_model import make
from serve.running import Running

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIONS = (
    *("--model", "serve.poison_model:make", "--mean", "0.5", "0.5", "0.5"),
    *("--std", "0.25", "0.25", "0.25", "--size", "16", "--method", "tent", "--no-guard"),
    *("--learn-samples", "2", "--snapshot-every", "1", "--queue-timeout", "2"),
    # Four requests at a time are what a replica wants; learning does not give way to twelve.
    *("--max-batch", "2", "--learn-queue", "64", "--replicas", "1", "--max-replicas", "2"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    state = ("--state-folder", str(folder), "--ray")
    with Running(Path("per-replica"), *OPTIONS, *state, wait=400) as found:
        yield found


def steps(server: Running) -> list[int]:
    return sorted(state["stream"]["step"] for state in replicas(server).values())


def test_a_second_replica_comes_under_load(server: Running) -> None:
    assert len(replicas(server)) == 1
    with Load(server, clients=12) as load:
        until(lambda: len(replicas(server)) == 2, 300)
        until(lambda: min(steps(server), default=0) > 0, 120)  # it learns, too
    assert set(load.statuses) <= {200, 503}, load.statuses
    assert load.statuses[200] > 100
    assert server.state()["policy"] == "per-replica"


def test_a_frozen_replica_is_replaced_and_no_request_hangs(server: Running, folder: Path) -> None:
    before = set(replicas(server))
    frozen = int((folder / "replica-0" / "lock").read_text())
    os.kill(frozen, signal.SIGSTOP)
    with Load(server, clients=4) as load:
        fresh = until(lambda: set(replicas(server)) - before, 300)
        until(lambda: len(replicas(server)) == 2, 120)
    assert len(fresh) == 1
    assert set(load.statuses) <= {200, 503}, load.statuses
    assert load.statuses[200] > 0
    assert load.slowest < 25  # --queue-timeout and 15 s
    until(lambda: not Path(f"/proc/{frozen}").exists(), 60)


def test_each_saves_what_it_learnt_itself(server: Running, folder: Path) -> None:
    learnt = steps(server)
    assert server.stop(120) == 0
    assert "the state is saved" in server.log
    saved = []
    for place in sorted(folder.glob("replica-*")):
        adapter = moetta.adapt(make(), "tent")
        adapter.load(max(place.rglob("*-*.safetensors")))  # a plain adapter's state
        saved.append((adapter.steps, dict(adapter.trained)))
    assert {count for count, _ in saved} >= set(learnt)
    assert len(saved) >= 2
    assert differ(saved[0][1], saved[1][1])


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not one[name].equal(other[name]) for name in one)
