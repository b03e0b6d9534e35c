"""Connecting to Ray and asking its nodes, for grids and for the service alike."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

CONNECT_SECONDS = 5.0
"""How long an address may take to answer, once for TCP and once for gRPC."""
NODE_SECONDS = 300.0
"""How long a node may take to start a worker, import moetta and look around."""
STORE_BYTES = 100_000_000
"""The object store of a Ray of our own: nothing large passes through it."""
CLIENT_PORT = "10001"
log = logging.getLogger("moetta")


def import_ray() -> Any:
    """Ray, which must never report to its makers what it is used for.

    Raises:
        ValueError: it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--ray needs Ray, which is not installed; install moetta with its ray extra: pip "
            "install 'moetta[ray]' (from a checkout: pip install '.[ray]')"
        ) from error
    return ray


def connect(address: str | None, *, here: dict[str, Any] | None = None, **options: Any) -> None:
    """Connect to the Ray cluster at an address; without one, start Ray on this machine.

    If this process is connected already, that connection is used. It lasts until the process ends
    or calls `ray.shutdown()`, so that a second grid need not start Ray again.

    Args:
        address: ``auto`` (the cluster that this machine is part of), ``host:port``,
            ``ray://host:port``, or None.
        here: more options of `ray.init` for a Ray that is started here.
        options: those for any.

    Raises:
        ValueError: the address is not one, or the versions there differ from those here.
        ConnectionError: nothing answers there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    if address == "local":
        address = None
    logging.getLogger("ray").setLevel(logging.ERROR)
    options["logging_level"] = logging.ERROR
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # as urgent as without Ray
        options.update(address="local", include_dashboard=False, object_store_memory=STORE_BYTES)
        options.update(here or {})
    else:
        options.update(address=_reachable(address))
    log.info("starting Ray on this machine" if address is None else f"connecting to Ray: {address}")
    try:
        with _without_sigterm():
            ray.init(**options)
    except Exception as error:  # a node that is too slow to start is a bare Exception
        raise _explained(error, address) from error


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """SIGTERM waits until the block ends, and never reaches processes started within it.

    Schedulers and supervisors send SIGTERM to all processes of a job, but Ray has to live until
    its workers have saved. Ray also installs a handler, which would replace ours.
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
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
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
    text = " ".join(str(error).split())
    if "ersion mismatch" in text or "Python minor versions" in text:
        return ValueError(
            f"the Ray cluster at {address} has other versions than this machine (Ray "
            f"{import_ray().__version__}, Python {platform.python_version()}); install the same "
            f"ones on both sides. {text}"
        )
    where = "Ray could not be started here" if address is None else f"no connection to {address}"
    hint = ""
    if address is not None and not address.startswith("ray://"):
        hint = "; a machine that is not part of the cluster connects with ray://host:10001"
    return ConnectionError(f"{where}: {text}{hint}")


def live_nodes() -> dict[str, Any]:
    """What Ray says about each node that is up, by the node's id."""
    return {node["NodeID"]: node for node in import_ray().nodes() if node["Alive"]}


def examine_nodes(
    nodes: dict[str, Any], version: str, examiner: str | None = None, sent: str = ""
) -> dict[str, list[str]]:
    """What is wrong on each of the nodes, beginning with another version of moetta.

    Args:
        nodes: what `live_nodes` gave, or some of it.
        version: the moetta that they should have.
        examiner: a function as ``module:name`` that is called on each node with the node's id and
            ``sent``, and returns more of what is wrong.
        sent: see there.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_examination())
    refs = {
        key: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False)
        ).remote(version, examiner, key, sent)
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
    return problems


def _examination() -> Callable[[str, str | None, str, str], list[str]]:
    """The task that examines a node.

    Ray sends nested functions whole, others by name, and moetta may be missing on the node.
    """

    def examine(version: str, examiner: str | None, node: str, sent: str) -> list[str]:
        from pkgutil import resolve_name

        try:
            found = resolve_name("moetta:__version__")
        except ImportError:
            return [f"moetta is not installed there; install version {version}"]
        if found != version:
            return [
                f"it has moetta {found}, but this command is of {version}; install the same "
                "version on both"
            ]
        if examiner is None:
            return []
        problems: list[str] = resolve_name(examiner)(node, sent)
        return problems

    return examine


def refuse(problems: dict[str, list[str]], nodes: dict[str, Any]) -> None:
    """Do nothing if there are no problems.

    Raises:
        ValueError: there are; what is wrong everywhere comes first, the rest with its node.
    """
    common = [p for p in next(iter(problems.values())) if all(p in ps for ps in problems.values())]
    lines = list(common)
    for key, found in problems.items():
        name = f"{nodes[key]['NodeManagerHostname']} ({nodes[key]['NodeManagerAddress']})"
        lines += [f"node {name}: {p}" for p in found if p not in common]
    if lines:
        raise ValueError("\n".join(lines))
