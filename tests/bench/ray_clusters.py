"""A small Ray cluster for tests, which ends with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # no token in the home folder of whoever runs the tests
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start_node(
    *options: str, inside: list[str] | None = None, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`ray start --block`: all its processes end with it."""
    command = [*(inside or []), *RAY, "start", "--block", "--disable-usage-stats"]
    command += ["--num-gpus", "0", "--object-store-memory", "80000000", *options]
    return subprocess.Popen(
        command,
        env={**ENVIRONMENT, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_node(node: subprocess.Popen[bytes]) -> None:
    node.terminate()
    try:
        node.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def wait_until_it_answers(host: str, port: int, node: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert node.poll() is None, "ray start failed"
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.2)
    raise TimeoutError("Ray did not start")


@contextlib.contextmanager
def cluster(cpus: int = 2) -> Iterator[str]:
    """The address of a cluster of one node."""
    temporary, port = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), free_port()
    options = ["--head", "--port", str(port), "--num-cpus", str(cpus), "--temp-dir", temporary]
    options += ["--include-dashboard", "false", "--ray-client-server-port", str(free_port())]
    node = start_node(*options, "--node-ip-address", "127.0.0.1")
    try:
        wait_until_it_answers("127.0.0.1", port, node)
        yield f"127.0.0.1:{port}"
    finally:
        end_node(node)
        shutil.rmtree(temporary, ignore_errors=True)


def ray_processes(group: int | None = None) -> list[int]:
    """The raylets and GCS servers that run, of a process group or of all."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            program = Path(os.readlink(entry / "exe")).name
            if program in ("raylet", "gcs_server") and group in (None, os.getpgid(int(entry.name))):
                found.append(int(entry.name))
    return found


def worker_of(label: str) -> int | None:
    """The process that runs a cell, by the title that Ray gives it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().startswith(f"ray::{label}".encode()):
                    return int(entry.name)
    return None
