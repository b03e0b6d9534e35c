"""A real server process, for end-to-end tests and benchmarks."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

SOURCES = Path(__file__).parents[2] / "src"
TOKEN = "a-token-for-tests"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


class Running:
    """`moetta serve` in a process; its address, its log, its end."""

    def __init__(
        self,
        state: Path,
        *options: str,
        wait: float = 120,
        environment: dict[str, str] | None = None,
    ) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(SOURCES), str(SOURCES.with_name("tests")))),
            "MOETTA_ADMIN_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",  # no token in the home folder of whoever runs the tests
            **(environment or {}),
        }
        self.begun = time.monotonic()
        command = [sys.executable, "-m", "moetta", "serve", "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, "--state", str(state), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._found: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            url = self._found.get(timeout=wait)
        except queue.Empty:
            url = None
        if url is None:
            self.kill()
            raise RuntimeError("the server did not start:\n" + self.log)
        self.seconds_to_ready = time.monotonic() - self.begun
        self.url = url
        self.port = int(url.rpartition(":")[2])
        # One client for all threads: making one costs more than a request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self.client = httpx.Client(base_url=url, timeout=30, limits=limits)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r" at (http://\S+)$", line.strip()):
                self._found.put(found[1])
        self._found.put(None)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def state(self, **headers: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(
            self.url + "/v1/state", headers=headers, timeout=20
        ).json()
        return found

    def metric(self, line: str) -> float:
        """The value of a metric, by its name with labels."""
        for found in self.client.get("/metrics").text.splitlines():
            if found.startswith(line + " "):
                return float(found.rpartition(" ")[2])
        raise KeyError(line)

    def predict(self, data: bytes, kind: str = "image/png", **options: Any) -> httpx.Response:
        headers = {"Content-Type": kind, **options.pop("headers", {})}
        return self.client.post("/v1/predict", content=data, headers=headers, params=options)

    def admin(self, call: str) -> httpx.Response:
        return self.client.post(f"/v1/adapt/{call}", headers=ADMIN)

    def memory(self) -> int:
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, wait: float = 60) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(wait)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)
        self._reader.join(5)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
