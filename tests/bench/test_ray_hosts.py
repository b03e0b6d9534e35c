"""Ray over two hosts, which are network namespaces joined by a cable that can be pulled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_clusters import ENVIRONMENT, HEAD, end_node, start_node, worker_of
from test_ray import COMMON, LONG, command, start
from test_resume import assert_same

from moetta.bench import make_grid, run_grid

pytest.importorskip("ray")
PORT = 6399
pytestmark = pytest.mark.timeout(900)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two hosts; the command runs on the first, whose Ray is the head."""

    first: str
    second: str
    cable: str

    def cut(self) -> None:
        ip("-n", self.first, "link", "set", self.cable, "down")

    def restore(self) -> None:
        ip("-n", self.first, "link", "set", self.cable, "up")

    def on_second(self, process: int | None) -> bool:
        """Whether a process runs on the second host."""
        if process is None:
            return False
        return os.path.samefile(f"/run/netns/{self.second}", f"/proc/{process}/ns/net")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    tag = f"{os.getpid() % 10000}"
    found = Hosts(f"moetta-a{tag}", f"moetta-b{tag}", f"va{tag}")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", found.first)
        ip("netns", "add", found.second)
        ip("link", "add", found.cable, "netns", found.first, "type", "veth", "peer", "name",
           "vb", "netns", found.second)  # fmt: skip
    except subprocess.CalledProcessError as error:
        for name in (found.first, found.second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
    for number, (name, cable) in enumerate([(found.first, found.cable), (found.second, "vb")], 1):
        ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
        ip("-n", name, "link", "set", cable, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield found
    for name in (found.first, found.second):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on(host: str) -> list[str]:
    return ["ip", "netns", "exec", host]


@contextlib.contextmanager
def cluster(hosts: Hosts, second_sees: str = "") -> Iterator[str]:
    """A head with one CPU on the first host, a node with another on the second.

    ``second_sees`` is a shell command that changes what the second host's disk looks like, before
    its Ray starts; `ip netns exec` gives it mounts of its own.
    """
    folders = [tempfile.mkdtemp(prefix="ray-", dir="/tmp") for _ in range(2)]
    quick = {  # a lost node is noticed sooner than usual, but a busy one is not taken for lost
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "4000",
        "RAY_health_check_failure_threshold": "5",
    }
    head = [*HEAD, "--port", str(PORT), "--temp-dir", folders[0], "--num-cpus", "1"]
    head += ["--node-ip-address", "10.77.0.1"]
    nodes = [start_node(*head, inside=on(hosts.first), environment=quick)]
    try:
        address = f"10.77.0.1:{PORT}"
        wait_until_nodes(hosts, address, 1)
        shell = ["sh", "-c", f'{second_sees or "true"} && exec "$@"', "sh"]
        joining = ["--address", address, "--node-ip-address", "10.77.0.2", "--num-cpus", "1"]
        nodes.append(start_node(*joining, inside=[*on(hosts.second), *shell], environment=quick))
        wait_until_nodes(hosts, address, 2)
        yield address
    finally:
        for node in reversed(nodes):
            end_node(node)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


COUNT = """
import sys, time
from ray._raylet import GcsClient
client, count = GcsClient(address=sys.argv[1]), int(sys.argv[2])
while sum(node.state == 0 for node in client.get_all_node_info().values()) != count:
    time.sleep(0.5)
"""


def wait_until_nodes(hosts: Hosts, address: str, count: int) -> None:
    """Wait until the head says that so many nodes are alive."""
    look = [*on(hosts.first), sys.executable, "-c", COUNT, address, str(count)]
    subprocess.run(look, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=180)


def stopped_on_second(hosts: Hosts, label: str) -> int | None:
    """The worker of a cell, stopped, if it is on the second host and still at work."""
    worker = worker_of(label)
    if worker is None or not hosts.on_second(worker):
        return None
    os.kill(worker, signal.SIGSTOP)
    if worker_of(label) == worker:
        return worker
    os.kill(worker, signal.SIGCONT)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["goes-on-alone", "dies-behind-the-cut"])
def test_the_link_is_cut_in_the_middle_and_restored(
    hosts: Hosts, tmp_path: Path, dies: bool
) -> None:
    """Both hosts see one disk. The link is cut while a cell runs on the second; each ends once.

    Ray has to report the second host dead. Left alone, its worker may finish the cell on the shared
    disk before the first host takes it over; if it dies, the first host has to.
    """
    fields = {**COMMON, "limit": 1600, "batch_size": 4, "threads": 1}
    cells = make_grid(method=["noadapt", "tent", "moetta"], seed=[1, 2], **fields)
    options = ["--stream", "classical", "--method", "noadapt", "tent", "moetta", "--limit", "1600"]
    options += ["--seeds", "1", "2", "--batch-size", "4", "--checkpoint-seconds", "0"]
    with cluster(hosts) as address:
        arguments = command(tmp_path / "runs", *options, "--ray", address)
        process = start([*on(hosts.first), *arguments])
        assert process.stdout is not None
        events, labels = [], {(cell.method, cell.seed): cell.label for cell in cells}
        label, worker = "", None
        for line in process.stdout:
            events.append(event := json.loads(line))
            ends = sum(event["event"] == "end" for event in events)
            # Early in its run: it must still be at work when the cut is felt.
            if event["event"] == "progress" and ends and 3 * event["step"] < event["steps"]:
                label = labels[event["method"], event["seed"]]
                done = f"runs/*__{event['method']}__s{event['seed']}__*/summary.json"
                worker = stopped_on_second(hosts, label)
                if worker is not None and list(tmp_path.glob(done)):
                    os.kill(worker, signal.SIGCONT)
                    worker = None
                if worker is not None:
                    break
        assert worker is not None
        hosts.cut()
        os.kill(worker, signal.SIGKILL if dies else signal.SIGCONT)
        wait_until_nodes(hosts, address, 1)
        hosts.restore()
        out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    if dies:
        assert f"{label}: its worker was lost; node" in err
        assert "(10.77.0.1) resumes it" in err
    events += [json.loads(line) for line in out.splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == len(cells) == len({event["folder"] for event in ends})
    assert [event["error"] for event in ends] == [None] * len(cells)
    for expected in run_grid(cells, tmp_path / "alone"):
        assert expected.folder is not None
        assert_same(tmp_path / "runs" / expected.folder.name, expected.folder)


@pytest.mark.slow
def test_what_one_host_lacks_is_named_with_the_host(hosts: Hosts, tmp_path: Path) -> None:
    for name in ("runs", "locked", "disk/imagenet"):
        (tmp_path / name).mkdir(parents=True)
    hidden = f"mount -t tmpfs none {tmp_path}/runs && mount -t tmpfs none {tmp_path}/disk"
    hidden += f" && mount --bind {tmp_path}/locked {tmp_path}/locked"
    hidden += f" && mount -o remount,ro,bind {tmp_path}/locked"
    with cluster(hosts, hidden) as address:

        def refusal(out: str, *options: str) -> str:
            arguments = command(tmp_path / out, *options, "--ray", address)
            done = subprocess.run(
                [*on(hosts.first), *arguments],
                env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG, check=False,
            )  # fmt: skip
            assert done.returncode == 1, done.stdout + done.stderr
            assert done.stdout == ""  # nothing has begun
            return done.stderr

        limit = ["--limit", "32", "--method", "tent"]
        lacking = refusal("ok", *limit, "--data", str(tmp_path / "disk" / "imagenet"))
        assert f"(10.77.0.2): there is no data folder {tmp_path}/disk/imagenet" in lacking
        assert "(10.77.0.1)" not in lacking
        unshared = refusal("runs", *limit, "--stream", "classical")
        assert f"(10.77.0.2): --out {tmp_path}/runs is not shared" in unshared
        readonly = refusal("locked", *limit, "--stream", "classical")
        assert f"(10.77.0.2): --out {tmp_path}/locked cannot be written to" in readonly
        assert "Read-only" in readonly
    assert not list((tmp_path / "runs").iterdir())
