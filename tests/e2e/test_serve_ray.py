"""The service on a Ray of its own: two replicas that merge, under load, with one of them killed.

The tests share one service and run in order: the last one stops it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import moetta
from serve.load import Load, replicas, until
from serve.poison_model import make
from serve.processes import below, process_of
from serve.running import Running
from serve.small_service import picture

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)
PNG = {"Content-Type": "image/png"}
OPTIONS = (
    *("--model", "serve.poison_model:make", "--mean", "0.5", "0.5", "0.5"),
    *("--std", "0.25", "0.25", "0.25", "--size", "16", "--method", "moetta", "--no-guard"),
    *("--learn-samples", "4", "--merge-every", "2", "--snapshot-every", "10", "--ray"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with Running(Path("merged"), "--state-folder", str(folder), *OPTIONS, wait=400) as found:
        yield found


def merged(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.state()["merged"]
    return found


def test_both_replicas_learn_and_are_merged(server: Running) -> None:
    with Load(server) as load:
        until(lambda: merged(server)["merges"] >= 2, 120)
    assert set(load.statuses) == {200}
    state = server.state()
    assert state["policy"] == "merged"
    assert len(state["replicas"]) == 2
    assert state["ready"]
    # Both go on from the merged step, which counts the steps of both.
    assert all(s["stream"]["step"] > 0 for s in state["replicas"].values())
    page = server.client.get("/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
    assert server.client.get("/healthz").json() == {"status": "ok"}
    assert server.client.get("/readyz").status_code == 200


def test_metrics_are_labelled_by_replica(server: Running) -> None:
    names = sorted(replicas(server))
    text = server.client.get("/metrics").text
    for name in names:
        assert f'moetta_batches_total{{learning="pooled",replica="{name}"}}' in text
    assert text.count("# TYPE moetta_batches_total counter") == 1
    answered = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("moetta_requests_total{") and 'status="200"' in line
    )
    front = next(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith('moetta_front_requests_total{status="200"}')
    )
    assert answered == front > 0


def test_admin_calls_reach_every_replica(server: Running) -> None:
    assert server.client.post("/v1/adapt/pause").status_code == 401
    assert len(server.admin("pause").json()["replicas"]) == 2
    assert all(s["stream"]["paused"] for s in replicas(server).values())
    assert server.admin("resume").status_code == 200
    assert not any(s["stream"]["paused"] for s in replicas(server).values())
    saved = server.admin("snapshot").json()
    assert saved["snapshot"] >= 1
    assert saved["step"] > 0
    assert server.admin("reset").json()["step"] == 0
    assert all(s["stream"]["step"] == 0 for s in replicas(server).values())
    assert server.admin(f"rollback?to={saved['snapshot']}").json()["step"] == saved["step"]
    assert all(s["stream"]["step"] == saved["step"] for s in replicas(server).values())
    assert server.admin("rollback?to=999").status_code == 409
    assert server.admin("rollback?to=-1").status_code == 422


def test_bad_requests_are_refused_as_without_ray(server: Running) -> None:
    assert server.predict(b"not an image").status_code == 415
    assert server.predict(picture(), headers={"X-Stream-Id": "a b"}).status_code == 422
    assert server.predict(b"x" * 10_000_001).status_code == 413
    foreign = server.predict(picture(), headers={"Host": "evil.example"})
    assert foreign.status_code == 421
    assert "x-request-id" in foreign.headers
    named = server.predict(picture(), headers={"X-Request-Id": "mine"})
    assert named.json()["request_id"] == named.headers["x-request-id"] == "mine"


def test_clients_that_give_up_do_not_hurt_later_batches(server: Running) -> None:
    def give_up(number: int) -> None:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                server.url + "/v1/predict", content=picture(number), headers=PNG, timeout=0.002
            )

    threads = [threading.Thread(target=give_up, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(20):
        assert server.predict(picture(number)).status_code == 200
    until(lambda: server.state()["queue"]["images"] == 0, 30)


def test_a_batch_that_fails_does_not_stop_the_next(server: Running) -> None:
    white = picture_of(255)
    for number in range(6):
        failed = server.predict(white)
        assert failed.status_code == 500
        assert "the log says why" in failed.json()["error"]
        assert server.predict(picture(number)).status_code == 200
    assert len(replicas(server)) == 2


def picture_of(grey: int) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (24, 24), (grey,) * 3).save(out, "PNG")
    return out.getvalue()


def test_a_killed_replica_costs_a_retry_and_comes_back_with_the_merged_state(
    server: Running,
) -> None:
    before = set(replicas(server))
    with Load(server) as load:
        time.sleep(2)
        step = merged(server)["step"]
        killed = next(iter(process_of("ray::ServeReplica", below(server.process.pid))))
        os.kill(killed, signal.SIGKILL)
        time.sleep(3)
        known = len(load.answers)
        until(lambda: len(load.answers) > known + 5, 60)  # the other one goes on
        fresh = until(lambda: set(replicas(server)) - before, 240)
        time.sleep(1)
    assert set(load.statuses) <= {200, 503}, load.statuses
    for answer in load.answers:
        assert isinstance(answer, httpx.Response)
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
    assert load.slowest < 20
    (name,) = fresh
    assert replicas(server)[name]["stream"]["step"] >= step > 0
    until(lambda: len(replicas(server)) == 2, 30)


def test_the_keeper_killed_loses_nothing(server: Running) -> None:
    step = merged(server)["step"]
    (keeper,) = process_of("ray::Keeper", below(server.process.pid))
    os.kill(keeper, signal.SIGKILL)
    with Load(server) as load:
        # It starts again and asks the replicas.
        until(lambda: server.state().get("merged", {}).get("step", 0) >= step, 120)
        version = merged(server)["version"]
        until(lambda: merged(server)["version"] > version, 120)
    assert set(load.statuses) == {200}


def answers_so_far(server: Running) -> int:
    """Requests to /v1/predict that reached a replica and were answered; 4xx came from the front."""
    lines = server.client.get("/metrics").text.splitlines()
    statuses = [f'moetta_front_requests_total{{status="{s}"}}' for s in (200, 415, 500, 503)]
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(tuple(statuses)))


def test_sigterm_drains_saves_and_leaves_no_process(server: Running, folder: Path) -> None:
    family = below(server.process.pid)
    assert len(family) > 5
    step = merged(server)["step"]
    answered = answers_so_far(server)
    with Load(server) as load:
        time.sleep(1)
        for pid in family:  # as supervisors do, to all processes of a service
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert server.stop(120) == 0
    assert "the state is saved" in server.log
    assert load.statuses[200] > 0
    said = re.search(r"(\d+) requests accepted, (\d+) answered", server.log)
    assert said is not None, server.log
    # Every answer reached its client; connections that had no request yet were closed.
    assert int(said[2]) == answered + load.statuses[200]
    for answer in load.answers:
        if isinstance(answer, httpx.Response):
            assert answer.status_code in (200, 503)
        else:
            # Closed with a request that the server had not read, a connection is reset.
            closed = httpx.ConnectError | httpx.RemoteProtocolError | httpx.ReadError
            assert isinstance(answer, closed), answer
    until(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()], 20)
    latest = max(folder.rglob("*-*.safetensors"))
    adapter = moetta.adapt(make(), "moetta")
    adapter.load(latest)  # a plain adapter's state
    assert adapter.steps >= step
    assert json.loads((latest.parent / "name").read_text().join('""')) == "default"
