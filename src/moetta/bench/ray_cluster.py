"""What a grid asks of a Ray cluster: room for its cells, and nodes that lack nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moetta
from moetta import ray_connect
from moetta.bench.cell import Cell
from moetta.bench.store import Store
from moetta.ray_connect import import_ray

RETRIES = 3
"""How often a cell is started again after its worker or node was lost."""


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


def connect(address: str | None) -> None:
    """Connect to Ray, see `ray_connect.connect`; its workers' output is not ours."""
    # Ray would start a run that needs too much memory again and again, for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    # Workers report through us. What Ray itself would print goes to stdout, into our JSON.
    import_ray()._private.worker._worker_logs_enabled = False
    ray_connect.connect(address, log_to_driver=False)


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
    nodes = ray_connect.live_nodes()
    for need in dict.fromkeys(needs):
        if not any(need.fit(node) for node in nodes.values()):
            most = max((n["Resources"].get("CPU", 0) for n in nodes.values()), default=0)
            raise ValueError(
                f"a run asks for {need} (its threads and loaders), but no node of the Ray cluster "
                f"has so much; the largest has {most:g} CPUs: lower --threads or --loaders"
                + (", or use --device cpu" if need.gpus else "")
            )
    nodes = {key: n for key, n in nodes.items() if any(need.fit(n) for need in needs)}
    ray_connect.refuse(_examine_all(nodes, cells, store, option), nodes)


def _examine_all(
    nodes: dict[str, Any], cells: Sequence[Cell], store: str, option: str
) -> dict[str, list[str]]:
    """What is wrong, by node."""
    place, probe = Store(store), f".probe-{uuid.uuid4().hex}"
    existed = "://" in store or Path(store).exists()
    sent = json.dumps(
        [store, option, probe, asdict(Surroundings.here()), [asdict(cell) for cell in cells]]
    )
    try:
        place.write(f"{probe}/driver", probe.encode())
    except Exception as error:
        raise ValueError(f"{option} {store} cannot be written to: {error}") from error
    try:
        examiner = f"{__name__}:{examine_here.__name__}"
        found = ray_connect.examine_nodes(nodes, moetta.__version__, examiner, sent)
        return {
            key: problems or _unseen(place, f"{probe}/{key}", option)
            for key, problems in found.items()
        }
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
