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
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # no token in the home folder of whoever runs the tests
    "RAY_worker_niceness": "0",  # or they would starve where much else runs
    "RAY_raylet_start_wait_time_s": "60",  # on a busy machine
}
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HEAD = ["--head", "--include-dashboard", "false", "--no-monitor"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start_node(
    *options: str, inside: list[str] | None = None, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`ray start --block`, once it has started; all its processes end with it.

    A raylet gives up if its agents need more than 15 s to start, as on a busy machine they may.
    """
    for _ in range(3):
        node, said = _try_node(list(options), inside or [], environment or {})
        if node is not None:
            return node
    raise RuntimeError(said)


def _try_node(
    options: list[str], inside: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[str] | None, str]:
    command = [*inside, *RAY, "start", "--block", "--disable-usage-stats"]
    command += ["--num-gpus", "0", "--object-store-memory", "80000000", *options]
    node = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert node.stdout is not None
    said = []
    for line in node.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            threading.Thread(target=node.stdout.read, daemon=True).start()
            return node, ""
    node.wait()
    return None, "".join(said)


def end_node(node: subprocess.Popen[str]) -> None:
    node.terminate()
    try:
        node.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@dataclass
class Cluster:
    """A cluster of one node."""

    address: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def cluster(cpus: int = 2) -> Iterator[Cluster]:
    """A cluster that ends with the block."""
    temporary, port = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), free_port()
    options = ["--port", str(port), "--num-cpus", str(cpus), "--temp-dir", temporary]
    options += ["--ray-client-server-port", str(free_port())]
    node = start_node(*HEAD, *options, "--node-ip-address", "127.0.0.1")
    try:
        yield Cluster(f"127.0.0.1:{port}", node)
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
