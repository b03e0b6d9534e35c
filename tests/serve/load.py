"""Clients that ask a real server without pause, and waiting for what must happen meanwhile."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from serve.running import Running
from serve.small_service import picture


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """What a condition returns, once that is true."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.3)
    return found


def replicas(server: Running) -> dict[str, Any]:
    """The replicas' states; empty while not all of them answer."""
    found = server.client.get("/v1/state")
    return dict(found.json()["replicas"]) if found.status_code == 200 else {}


class Load:
    """Clients that ask without pause until told to stop."""

    def __init__(self, server: Running, clients: int = 6) -> None:
        self.answers: list[httpx.Response | Exception] = []
        self.slowest = 0.0
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def _ask(self, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            begun = time.monotonic()
            try:
                self.answers.append(self._server.predict(picture(1000 * number + asked)))
            except Exception as error:
                self.answers.append(error)
                return
            self.slowest = max(self.slowest, time.monotonic() - begun)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    @property
    def statuses(self) -> collections.Counter[Any]:
        """How often each status was answered; errors by their text."""
        return collections.Counter(
            repr(a) if isinstance(a, Exception) else a.status_code for a in self.answers
        )
