"""Connecting to Ray, and checking its nodes before any work starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moetta
from moetta.bench.cell import Cell
from moetta.bench.store import Store

CONNECT_SECONDS = 5.0
"""How long an address may take to answer, once for TCP and once for gRPC."""
NODE_SECONDS = 300.0
"""How long a node may take to start a worker, import moetta and check the cells."""
RETRIES = 3
"""How often a cell is started again after its worker or node was lost."""
log = logging.getLogger("moetta")
CLIENT_PORT = "10001"


@dataclass(frozen=True)
class Needs:
    """What a cell asks Ray for."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, cell: Cell) -> Needs:
        """Its threads and loaders as CPUs, and one GPU if it computes on CUDA."""
        return cls((cell.threads or 1) + cell.loaders, int(cell.device.startswith("cuda")))

    def fit(self, node: dict[str, Any]) -> bool:
        """Whether a node, when idle, has this much."""
        has = node["Resources"]
        return bool(has.get("CPU", 0) >= self.cpus and has.get("GPU", 0) >= self.gpus)

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPU" if self.gpus else ""
        return f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}{gpus}"


@dataclass(frozen=True)
class Surroundings:
    """Where the command runs: relative paths and the user's own modules are found from there."""

    folder: str
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        return cls(os.getcwd(), tuple(os.path.abspath(entry) for entry in sys.path))

    def enter(self) -> None:
        """Make them those of this process, as far as they exist on this machine."""
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        sys.path += [p for p in self.path if p not in sys.path and os.path.exists(p)]


def import_ray() -> Any:
    """Ray, which must never report to its makers what it is used for.

    Raises:
        ValueError: it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray would start a run that needs too much memory again and again, for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--ray needs Ray, which is not installed; install moetta with its ray extra: pip "
            "install 'moetta[ray]' (from a checkout: pip install '.[ray]')"
        ) from error
    return ray


def connect(address: str | None) -> None:
    """Connect to the Ray cluster at an address; without one, start Ray on this machine.

    If this process is connected already, that connection is used. It lasts until the process ends
    or calls `ray.shutdown()`, so that a second grid need not start Ray again.

    Args:
        address: ``auto`` (the cluster that this machine is part of), ``host:port``,
            ``ray://host:port``, or None.

    Raises:
        ValueError: the address is not one, or the versions there differ from those here.
        ConnectionError: nothing answers there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Workers report through us. What Ray itself would print goes to stdout, into our JSON.
    ray._private.worker._worker_logs_enabled = False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None or address == "local":
        os.environ.setdefault("RAY_worker_niceness", "0")  # as urgent as without Ray
        options.update(address="local", include_dashboard=False, object_store_memory=100_000_000)
    else:
        options.update(address=_reachable(address))
    log.info("starting Ray on this machine" if address is None else f"connecting to Ray: {address}")
    try:
        with _without_sigterm():
            ray.init(**options)
    except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
        raise _explained(error, address) from error


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """SIGTERM waits until the block ends, and never reaches processes started within it.

    Schedulers send SIGTERM to all processes of a job, but Ray has to live until the runs have
    written their checkpoints. Ray also installs a handler, which would replace ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reachable(address: str) -> str:
    """The address itself, once something there has answered.

    Ray would try for most of a minute, and then end the whole process.
    """
    place = address
    if address == "auto":
        place = _own_cluster()
    client = place.startswith("ray://")
    host, colon, port = place.removeprefix("ray://").rpartition(":")
    if client and not colon:
        host, port = port, CLIENT_PORT
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{address!r} is not the address of a Ray cluster; expected auto, host:port or "
            "ray://host:port (the name of an experiment goes before --ray)"
        )
    what = f"no Ray cluster answers at {address}"
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS):
            pass
    except OSError as error:
        raise ConnectionError(
            f"{what} ({error}); start one with ray start --head, correct the address, or give "
            "--ray alone to start Ray on this machine"
        ) from error
    if not _speaks_grpc(host, int(port)):
        usual = CLIENT_PORT if client else "6379"
        raise ConnectionError(
            f"{what}: something else listens there; Ray's own port is usually {usual}"
        )
    return place if address == "auto" else address


def _own_cluster() -> str:
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if (given := os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        return given
    try:
        found: str = canonicalize_bootstrap_address_or_die("auto")
    except (ConnectionError, ValueError) as error:
        raise ConnectionError(
            "no Ray cluster runs on this machine; start one with ray start --head, name one as "
            "host:port, or give --ray alone to start Ray for this command"
        ) from error
    return found


def _speaks_grpc(host: str, port: int) -> bool:
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True  # only Ray knows the certificates
    import grpc

    with grpc.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            return False
    return True


def _explained(error: Exception, address: str | None) -> Exception:
    text = str(error).strip()
    if "ersion mismatch" in text or "Python minor versions" in text:
        return ValueError(
            f"the Ray cluster at {address} has other versions than this machine (Ray "
            f"{import_ray().__version__}, Python {platform.python_version()}); install the same "
            f"ones on both sides. {' '.join(text.split())}"
        )
    where = "Ray could not be started here" if address is None else f"no connection to {address}"
    hint = ""
    if address is not None and not address.startswith("ray://"):
        hint = "; a machine that is not part of the cluster connects with ray://host:10001"
    return ConnectionError(f"{where}: {text}{hint}")


def check_nodes(cells: Sequence[Cell], needs: Sequence[Needs], store: str, option: str) -> None:
    """Refuse, before anything starts, what some node could not do.

    Args:
        cells: all of them must be able to run on each node that is large enough for any.
        needs: what the cells to run ask for.
        store: where results go: a folder or a URL.
        option: the command-line option that names it.

    Raises:
        ValueError: names each node and what is wrong with it.
    """
    ray = import_ray()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    for need in dict.fromkeys(needs):
        if not any(need.fit(node) for node in nodes.values()):
            most = max((n["Resources"].get("CPU", 0) for n in nodes.values()), default=0)
            raise ValueError(
                f"a run asks for {need} (its threads and loaders), but no node of the Ray cluster "
                f"has so much; the largest has {most:g} CPUs: lower --threads or --loaders"
                + (", or use --device cpu" if need.gpus else "")
            )
    nodes = {key: n for key, n in nodes.items() if any(need.fit(n) for need in needs)}
    problems = _examine_all(nodes, cells, store, option)
    common = [p for p in next(iter(problems.values())) if all(p in ps for ps in problems.values())]
    lines = list(common)
    for key, found in problems.items():
        lines += [f"node {_name(nodes[key])}: {p}" for p in found if p not in common]
    if lines:
        raise ValueError("\n".join(lines))


def _examine_all(
    nodes: dict[str, Any], cells: Sequence[Cell], store: str, option: str
) -> dict[str, list[str]]:
    """What is wrong, by node."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place, probe = Store(store), f".probe-{uuid.uuid4().hex}"
    existed = "://" in store or Path(store).exists()
    task = ray.remote(num_cpus=0, max_retries=0)(_examiner())
    sent = json.dumps(
        [store, option, probe, asdict(Surroundings.here()), [asdict(cell) for cell in cells]]
    )
    try:
        place.write(f"{probe}/driver", probe.encode())
    except Exception as error:
        raise ValueError(f"{option} {store} cannot be written to: {error}") from error
    try:
        refs = {
            key: task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False)
            ).remote(moetta.__version__, key, sent)
            for key in nodes
        }
        ready, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=NODE_SECONDS)
        for ref in late:
            ray.cancel(ref, force=True)
        problems: dict[str, list[str]] = {}
        for key, ref in refs.items():
            if ref not in ready:
                problems[key] = [
                    f"a worker there did not answer within {NODE_SECONDS:.0f} s; is the machine "
                    "overloaded?"
                ]
                continue
            try:
                problems[key] = ray.get(ref)
            except ray.exceptions.RayError as error:
                problems[key] = [str(error).strip().splitlines()[-1]]
            if not problems[key]:
                problems[key] = _unseen(place, f"{probe}/{key}", option)
        return problems
    finally:
        with contextlib.suppress(Exception):
            place.remove(probe)
        if not existed:
            with contextlib.suppress(OSError):  # it holds results by now
                Path(store).rmdir()


def _unseen(place: Store, name: str, option: str) -> list[str]:
    try:
        place.read(name)
    except FileNotFoundError:
        return [_not_shared(place.url, option)]
    return []


def _not_shared(store: str, option: str) -> str:
    return (
        f"{option} {store} is not shared with the machine that runs this command; name a folder "
        "that all nodes share, or keep the runs at a URL that all can reach, with --store"
    )


def _examiner() -> Callable[[str, str, str], list[str]]:
    """The function that examines a node.

    Ray sends nested functions whole, others by name, and moetta may be missing on the node.
    """

    def examine(version: str, node: str, sent: str) -> list[str]:
        try:
            import moetta
        except ImportError:
            return [f"moetta is not installed there; install version {version}"]
        if moetta.__version__ != version:
            return [
                f"it has moetta {moetta.__version__}, but this command is of {version}; install "
                "the same version on both"
            ]
        from moetta.bench.ray_cluster import examine_here

        return examine_here(node, sent)

    return examine


def examine_here(node: str, sent: str) -> list[str]:
    """What is wrong on this node; called on the node itself."""
    store, option, probe, surroundings, cells = json.loads(sent)
    Surroundings(**surroundings).enter()
    problems = []
    try:
        place = Store(store)
        if place.read(f"{probe}/driver") != probe.encode():
            raise FileNotFoundError
        place.write(f"{probe}/{node}", b"")
    except FileNotFoundError:
        problems.append(_not_shared(store, option))
    except Exception as error:
        problems.append(f"{option} {store} cannot be written to: {error}")
    for cell in cells:
        try:
            Cell.from_card({"cell": cell}).check()
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
