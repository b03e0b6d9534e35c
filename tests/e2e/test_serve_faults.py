"""Everything that goes wrong around a service, done to a real one; it must stay up, or come back.

All load stays on this machine and is bounded in count and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from serve.processes import below
from serve.running import SOURCES, Running
from serve.small_service import picture

# On a busy machine a client may need more than a second for its headers.
OPTIONS = (
    *("--learn-samples", "8", "--snapshot-every", "2", "--max-wait-ms", "60"),
    *("--body-timeout", "3", "--header-timeout", "4", "--max-body", "200000"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("state"), *OPTIONS) as found:
        yield found
        assert found.process.poll() is None, found.log


@pytest.fixture(autouse=True)
def _still_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.predict(picture()).status_code == 200
        assert "Traceback" not in server.log


def until(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def head(length: int, stream: str = "default") -> bytes:
    return (
        b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
        b"X-Stream-Id: %s\r\nContent-Length: %d\r\n\r\n" % (stream.encode(), length)
    )


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            found += chunk
    return found


# --- bodies -------------------------------------------------------------------------------------


def garbage(rng: np.random.Generator) -> tuple[bytes, str]:
    """A body that is wrong in one of many ways, and its content type."""
    kinds = ["image/png", "image/jpeg", "image/webp", "application/json", "text/plain", ""]
    kinds += ["multipart/form-data; boundary=x", "multipart/form-data", "\x7f/\x01"]
    kind = kinds[rng.integers(len(kinds))]
    body = rng.bytes(int(rng.integers(0, 400)))
    starts = [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"RIFF\x00\x00\x00\x00WEBP",
        b'["',
        b"--x",
    ]
    if rng.random() < 0.3:  # a good image with a few bytes changed
        broken = bytearray(picture(side=8))
        for place in rng.integers(8, len(broken), 3):
            broken[place] = rng.integers(256)
        return bytes(broken), kind
    return starts[rng.integers(len(starts))] + body, kind


async def fuzz(server: Running, count: int, clients: int = 16) -> Counter[int]:
    """Send random bytes; returns how often each status came back."""
    codes: Counter[int] = Counter()
    left = iter(range(count))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:

        async def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in left:
                body, kind = garbage(rng)
                headers = {"Content-Type": kind.encode("latin-1")} if kind.isprintable() else {}
                answer = await client.post("/v1/predict", content=body, headers=headers)
                codes[answer.status_code] += 1

        await asyncio.gather(*(work(seed) for seed in range(clients)))
    return codes


def test_garbage_bodies(server: Running) -> None:
    codes = asyncio.run(fuzz(server, 400))
    assert codes.total() == 400
    assert set(codes) <= {200, 413, 415, 422}
    assert {415, 422} <= set(codes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_requests_of_random_bytes(server: Running) -> None:
    before = server.memory()
    codes = asyncio.run(fuzz(server, 10_000))
    assert codes.total() == 10_000
    assert set(codes) <= {200, 413, 415, 422}
    assert server.memory() < before + 100e6


def test_what_is_not_http(server: Running) -> None:
    rng = np.random.default_rng(0)
    for body in (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01" + rng.bytes(200),
        b"\r\n" * 99,
    ):
        with connect(server) as connection:
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in received(connection)


def test_a_body_larger_than_it_may_be(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(head(10**12))
        assert b" 413 " in connection.recv(4096)


# --- clients ------------------------------------------------------------------------------------


def test_slow_clients_are_cut_off_and_hold_nobody_up(server: Running) -> None:
    slow = [connect(server) for _ in range(20)]
    for connection in slow[:10]:
        connection.sendall(b"POST /v1/predict HT")  # never finishes its headers
    for connection in slow[10:]:
        connection.sendall(head(1000) + b"abc")  # never finishes its body
    begun = time.monotonic()
    assert server.predict(picture()).status_code == 200
    assert time.monotonic() - begun < 5
    for connection in slow[:10]:
        assert received(connection) == b""  # closed
    for connection in slow[10:]:
        assert b" 408 " in connection.recv(4096)
    for connection in slow:
        connection.close()


def test_clients_that_vanish_cost_no_forward_pass(server: Running) -> None:
    def images(outcome: str) -> float:
        return server.metric(f'moetta_images_total{{outcome="{outcome}"}}')

    answered, abandoned = images("answered"), images("abandoned")
    body = picture()
    for _ in range(10):
        with connect(server) as connection:
            connection.sendall(head(len(body)) + body)
            time.sleep(0.005)
    until(lambda: images("abandoned") + images("answered") == abandoned + answered + 10)
    assert images("abandoned") > abandoned
    for _ in range(5):  # and those who vanish half-way through a body
        with connect(server) as connection:
            connection.sendall(head(5000) + body[:100])


def test_a_batch_mate_that_vanishes_hurts_nobody(server: Running) -> None:
    body = picture(7)
    alone = server.predict(body, headers={"X-Stream-Id": "mates"}).json()["predictions"]
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.predict(body, headers={"X-Stream-Id": "mates"}))

    stays = [threading.Thread(target=ask) for _ in range(3)]
    for thread in stays:
        thread.start()
    with connect(server) as leaves:
        leaves.sendall(head(len(body), "mates") + body)
    for thread in stays:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [200] * 3
    labels = alone[0]["labels"]
    for answer in answers:
        found = answer.json()["predictions"][0]["labels"]
        assert [entry["label"] for entry in found] == [entry["label"] for entry in labels]


# --- the disk -----------------------------------------------------------------------------------


def learn(server: Running, images: int) -> None:
    for seed in range(images):
        assert server.predict(picture(seed)).status_code == 200


def test_a_full_disk(server: Running) -> None:
    saved = 'moetta_snapshots_total{outcome="saved"}'
    failed = 'moetta_snapshots_total{outcome="failed"}'
    assert server.admin("snapshot").status_code == 200
    # As on a full disk, writing stops in the middle of a file.
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        learn(server, 40)
        until(lambda: server.metric(failed) >= 1)
        assert server.admin("snapshot").status_code == 507
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
    before = server.metric(saved)
    assert server.admin("snapshot").status_code == 200
    assert server.metric(saved) == before + 1
    assert "could not be saved" in server.log


# --- the end ------------------------------------------------------------------------------------


class Crowd:
    """Clients in threads, each request on a connection of its own; notes what came of each."""

    def __init__(self, server: Running, clients: int = 12) -> None:
        self.server = server
        self.outcomes: Counter[str] = Counter()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(seed,), daemon=True)
            for seed in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, seed: int) -> None:
        body = picture(seed)
        while not self._over.is_set():
            try:
                once = {"Connection": "close"}  # so that an idle one is not cut at the end
                outcome = str(self.server.predict(body, headers=once).status_code)
            except httpx.ConnectError:
                outcome = "refused"
                time.sleep(0.05)
            except httpx.TransportError:
                outcome = "cut"
            with self._lock:
                self.outcomes[outcome] += 1

    def stop(self) -> Counter[str]:
        self._over.set()
        for thread in self._threads:
            thread.join(40)
            assert not thread.is_alive(), "a client hangs"
        return self.outcomes


def files(state: Path) -> list[Path]:
    return sorted(state.rglob("*-*.safetensors"))


def test_kill_9_and_sigterm_under_load(tmp_path: Path) -> None:
    with Running(tmp_path, *OPTIONS) as server:
        crowd = Crowd(server)
        until(lambda: len(files(tmp_path)) >= 3, 60)
        assert below(server.process.pid) == set()  # no child can outlive a process without any
        step = server.state()["stream"]["step"]
        server.kill()
        outcomes = crowd.stop()
        assert set(outcomes) <= {"200", "503", "refused", "cut"}
        assert outcomes["200"] > 0
    # The latest snapshot is damaged, as if the machine had lost power; the one before is used.
    *_, second, latest = files(tmp_path)
    latest.write_bytes(latest.read_bytes()[:-100])

    with Running(tmp_path, *OPTIONS) as server:
        assert f"{latest.name} is damaged" in server.log
        assert second.is_file()
        continued = server.state()["stream"]["step"]
        assert 0 < continued <= step + 50
        crowd = Crowd(server)
        until(lambda: server.state()["stream"]["step"] > continued + 2, 60)
        learned = server.state()["stream"]["step"]
        assert server.stop() == 0
        outcomes = crowd.stop()
        assert set(outcomes) <= {"200", "503", "refused", "cut"}
        said = re.search(r"(\d+) requests accepted, (\d+) answered, (\d+) left", server.log)
        assert said is not None, server.log
        accepted, answered, left = map(int, said.groups())
        # Every accepted request has its one answer, and every answer reached its client.
        assert (accepted, left) == (answered, 0)
        assert outcomes["200"] == answered

    with Running(tmp_path, *OPTIONS) as server:
        assert server.state()["stream"]["step"] >= learned  # nothing was lost
        with pytest.raises(RuntimeError, match="another service uses the state"):
            Running(tmp_path)
        assert server.stop() == 0


# --- signals and clocks -------------------------------------------------------------------------


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(tmp_path: Path, again: signal.Signals) -> None:
    with Running(tmp_path, *OPTIONS[:-6], "--body-timeout", "100") as server:
        learn(server, 24)
        until(lambda: len(files(tmp_path)) >= 1)
        body = picture()
        with connect(server) as slow:
            expecting = b"\r\nExpect: 100-continue\r\n\r\n"
            slow.sendall(head(len(body)).replace(b"\r\n\r\n", expecting))
            assert b"100 Continue" in slow.recv(4096)  # now it waits for the body
            slow.sendall(body[:-1])
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "finishing what was accepted" in server.log)
            time.sleep(1)
            assert server.process.poll() is None
            assert below(server.process.pid) == set()
            server.process.send_signal(again)
            assert server.process.wait(10) == 1
        until(lambda: "again: leaving at once" in server.log)
    with Running(tmp_path, *OPTIONS) as server:
        assert server.state()["stream"]["step"] >= 2
        assert "damaged" not in server.log
        assert server.stop() == 0


JUMPING_CLOCK = """
import os, time

def jumping(real, unit):
    def now():
        with open(os.environ["CLOCK_OFFSET"]) as file:
            return real() + int(file.read()) * unit
    return now

time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
"""


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    offset, state = tmp_path / "offset", tmp_path / "state"
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    clock = {"CLOCK_OFFSET": str(offset), "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}"}

    def jump(seconds: int) -> None:
        new = tmp_path / "new"
        new.write_text(str(seconds))
        new.replace(offset)

    year = 365 * 24 * 3600
    jump(0)
    with Running(state, *OPTIONS, environment=clock) as server:
        crowd = Crowd(server, 4)
        for seconds in (year, -year, 5, 0, -3600, -30 * year):
            step = server.state()["stream"]["step"]
            jump(seconds)
            until(lambda step=step: server.state()["stream"]["step"] > step + 2, 60)
        at = server.metric("moetta_snapshot_timestamp_seconds")
        assert at < time.time() - 29 * year  # the service has seen the jumps
        latest = server.state()["stream"]["snapshots"][0]
        assert set(crowd.stop()) == {"200"}
        assert server.metric('moetta_images_total{outcome="expired"}') == 0
        assert server.stop() == 0
    jump(-40 * year)  # the files of the last run lie in the future now
    with Running(state, *OPTIONS, environment=clock) as server:
        assert server.state()["stream"]["snapshots"][0] >= latest
        assert server.state()["stream"]["step"] > step
        learn(server, 40)
        assert server.admin("snapshot").json()["snapshot"] > latest
        assert server.stop() == 0
