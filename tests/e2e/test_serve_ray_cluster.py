"""The service on a Ray cluster that exists: each stream has its replica, and the cluster stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
from ray_clusters import Cluster

from serve.processes import below, process_of
from serve.running import Running
from serve.small_service import picture

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)
STREAMS = [f"camera-{number}" for number in range(6)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_clusters.cluster(cpus=3) as found:
        yield found


def replicas(cluster: Cluster) -> dict[str, int]:
    """Process ids of the replicas, by application."""
    found = process_of("ray::ServeReplica:moetta", below(cluster.process.pid))
    return {command.split(":")[3]: pid for pid, command in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def start(cluster: Cluster, folder: Path, *options: str) -> Running:
    return Running(
        Path("by-stream"),
        *("--state-folder", str(folder), "--model", "serve.poison_model:make"),
        *("--mean", "0.5", "0.5", "0.5", "--std", "0.25", "0.25", "0.25", "--size", "16"),
        *("--method", "tent", "--learn-samples", "2", "--snapshot-every", "1"),
        *("--ray", cluster.address, *options),
        wait=300,
    )


def ask(server: Running, stream: str, times: int = 1) -> list[int]:
    headers = {"X-Stream-Id": stream}
    return [server.predict(picture(n), headers=headers).status_code for n in range(times)]


def owners(server: Running, stream: str) -> dict[str, Any]:
    """The replicas that have a stream in memory, with its state."""
    state = server.state(**{"X-Stream-Id": stream})
    assert state["policy"] == "by-stream"
    return {
        name: found["stream"]
        for name, found in state["replicas"].items()
        if found["stream"]["in_memory"]
    }


@pytest.fixture(scope="module")
def server(cluster: Cluster, folder: Path) -> Iterator[Running]:
    with start(cluster, folder) as found:
        yield found


def test_a_stream_always_reaches_the_same_replica(server: Running) -> None:
    for _ in range(2):
        for stream in STREAMS:
            assert ask(server, stream, 6) == [200] * 6
    found = {stream: owners(server, stream) for stream in STREAMS}
    assert all(len(replicas) == 1 for replicas in found.values())
    assert all(next(iter(r.values()))["images"] >= 12 for r in found.values())
    assert len({name for replicas in found.values() for name in replicas}) == 2


def test_an_admin_call_reaches_the_stream_that_it_names(server: Running) -> None:
    headers = {"X-Stream-Id": STREAMS[0], "Authorization": "Bearer a-token-for-tests"}
    paused = server.client.post("/v1/adapt/pause", headers=headers)
    assert paused.json()["stream"] == STREAMS[0]
    (state,) = owners(server, STREAMS[0]).values()
    assert state["paused"]
    (state,) = owners(server, STREAMS[1]).values()
    assert not state["paused"]
    assert len(server.admin("pause?all=true").json()["replicas"]) == 2
    assert server.state()["adapting"]["paused"]
    assert server.admin("resume?all=true").status_code == 200
    assert server.client.post("/v1/adapt/resume", headers=headers).status_code == 200


def test_a_stream_whose_replica_died_comes_back_from_its_snapshot(
    server: Running, cluster: Cluster
) -> None:
    stream = STREAMS[0]
    ((name, before),) = owners(server, stream).items()
    shard = server.state(**{"X-Stream-Id": stream})["stream"]["shard"]
    other = next(
        s for s in STREAMS if server.state(**{"X-Stream-Id": s})["stream"]["shard"] != shard
    )
    os.kill(replicas(cluster)[f"moetta-{shard}"], signal.SIGKILL)
    assert set(ask(server, other, 5)) == {200}  # the others notice nothing
    give_up = time.monotonic() + 240
    while (statuses := set(ask(server, stream))) != {200}:
        assert statuses == {503}
        assert time.monotonic() < give_up
    ((again, after),) = owners(server, stream).items()
    assert again != name
    assert after["step"] >= before["step"] - 1 > 0


def test_a_second_service_of_that_name_is_refused(
    server: Running, cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="'moetta' already runs on this cluster"):
        start(cluster, tmp_path)
    assert ask(server, STREAMS[0]) == [200]


@pytest.mark.slow
def test_after_kill_9_a_new_one_takes_over_and_sigterm_leaves_the_cluster(
    server: Running, cluster: Cluster, folder: Path
) -> None:
    for stream in STREAMS:  # those of the replica that died come back when they are asked for
        assert ask(server, stream, 6) == [200] * 6
    steps = {stream: next(iter(owners(server, stream).values()))["step"] for stream in STREAMS}
    server.kill()
    with start(cluster, folder) as fresh:
        for stream in STREAMS:
            assert ask(fresh, stream) == [200]
            (state,) = owners(fresh, stream).values()
            assert state["step"] >= steps[stream] - 1 > 0
        assert fresh.stop(120) == 0
        assert "the state is saved" in fresh.log
    assert cluster.process.poll() is None
    give_up = time.monotonic() + 30
    while replicas(cluster):
        assert time.monotonic() < give_up
        time.sleep(0.5)
