"""The front without Ray: whom it asks, and what clients are told when there is no answer."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

pytest.importorskip("ray")
from moetta.serve.ray_front import create_front
from moetta.serve.ray_replica import Call, Reply
from moetta.serve.settings import Settings

ADMIN = {"Authorization": "Bearer a-token-for-tests"}


class Remote:
    """A method of an actor; keeps what it was called with."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *args: Any) -> Any:
        self.calls.append(args)
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            found.set_exception(self.answer)
        else:
            found.set_result(self.answer)
        return found


class Handle:
    """Two replicas behind one handle."""

    def __init__(self) -> None:
        self.http = Remote(Reply(200, [], b"{}", "one"))
        self.asked: list[str] = []

    def broadcast(self, method: str, *args: Any) -> Any:
        self.asked.append(method)
        answers: list[Any] = [True, True]
        if method != "stop":
            body = b'{"paused": true}' if method == "pause" else b""
            answers = [Reply(200, [], body, "one"), RuntimeError("it is gone")]

        class Broadcast:
            async def results_async(self, **_: Any) -> list[Any]:
                return answers

        return Broadcast()


class Keeper:
    def __init__(self) -> None:
        self.reset = Remote({"step": 0, "snapshot": 1})
        self.rollback = Remote(None)
        self.snapshot = Remote(OSError(errno.ENOSPC, "No space left on device"))
        self.pause = Remote(None)
        self.pauses = Remote({"all": False, "streams": ["default"]})
        self.finish = Remote(True)


class Service:
    def __init__(self) -> None:
        self.handle, self.keeper, self.ended = Handle(), Keeper(), False
        self.app = create_front(
            Settings(admin_token="a-token-for-tests"),
            "merged",
            lambda front: ([self.handle], self.keeper),
            self.end,
        )

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(service.app, base_url="http://127.0.0.1") as found:
        yield found
    # Everything is merged and saved before the replicas end.
    assert service.keeper.finish.calls == [()]
    assert service.handle.asked[-1] == "stop"
    assert service.ended
    assert service.app.state.service.saved


def test_a_request_goes_to_a_replica_under_its_id(service: Service, client: TestClient) -> None:
    found = client.post("/v1/predict", content=b"image", headers={"X-Request-Id": "mine"})
    assert found.status_code == 200
    assert found.headers["x-request-id"] == "mine"
    ((call,),) = service.handle.http.calls
    assert isinstance(call, Call)
    assert (call.path, call.body) == ("/v1/predict", b"image")
    assert (b"x-request-id", b"mine") in call.headers


def test_a_replica_that_is_gone_is_worth_a_retry(service: Service, client: TestClient) -> None:
    from ray.exceptions import ActorDiedError

    service.handle.http.answer = ActorDiedError()
    found = client.post("/v1/predict", content=b"image")
    assert found.status_code == 503
    assert int(found.headers["retry-after"]) >= 1
    assert "gone; try again" in found.json()["error"]


def test_merged_states_belong_to_the_keeper(service: Service, client: TestClient) -> None:
    assert client.post("/v1/adapt/reset").status_code == 401
    reset = client.post("/v1/adapt/reset", headers=ADMIN).json()
    assert reset == {"stream": "default", "paused": True, "step": 0, "snapshot": 1}
    full = client.post("/v1/adapt/snapshot", headers=ADMIN)
    assert full.status_code == 507
    assert "No space left" in full.json()["error"]
    none = client.post("/v1/adapt/rollback?to=3", headers=ADMIN)
    assert none.status_code == 409
    assert "no good snapshot 3" in none.json()["error"]
    assert service.keeper.rollback.calls == [("default", 3)]
    assert client.post("/v1/adapt/rollback?to=-1", headers=ADMIN).status_code == 422


def test_a_pause_reaches_all_and_is_kept_for_later(service: Service, client: TestClient) -> None:
    found = client.post("/v1/adapt/pause?all=true", headers=ADMIN).json()
    assert found["replicas"] == {"one": {"paused": True}}  # the other one did not answer
    assert service.handle.asked == ["pause"]
    assert service.keeper.pause.calls == [("default", True, True)]
    assert "moetta_front_replicas 1.0" in client.get("/metrics").text
