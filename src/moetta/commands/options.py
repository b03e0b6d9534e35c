"""What several commands share: options, running cells, writing the page."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moetta.bench import spread
from moetta.bench.backends import Backend, make_backend
from moetta.bench.cell import Cell, CellOptions, ComputeOptions
from moetta.bench.grid import run_grid
from moetta.bench.progress import Outcome
from moetta.commands.display import Display, make_display
from moetta.commands.ray_option import HERE, RayAddress
from moetta.methods import list_methods
from moetta.paper.published import METHODS as PAPER_METHODS


@dataclass(frozen=True)
class Running(ComputeOptions):
    """How and where cells are run."""

    out: Path = Path("runs")
    """Folder of the results; finished runs in it are not run again."""
    workers: int = 1
    """How many runs to compute at the same time, each in its own process."""
    checkpoint_seconds: float = 30.0
    """How many seconds of work a killed process may lose."""
    ray: RayAddress = None
    """Run on Ray (extra: ray): started on this machine, or the cluster at auto, host:port or
    ray://host:port. Each run reserves --threads CPUs, 1 by default, and a GPU with --device
    cuda."""
    store: str | None = None
    """With --ray: an fsspec URL (s3://bucket/runs) for checkpoints and results, if the nodes do not
    share --out; finished runs are copied to --out."""
    json: bool = False
    """Print JSON, one object per line."""

    def backend(self) -> Backend:
        """What runs the cells.

        Raises:
            ValueError: options contradict each other.
        """
        if "://" in str(self.out) or str(self.out).partition(":/")[0] in ("s3", "gs", "file"):
            raise ValueError(
                f"--out must be a folder, got {self.out}; with --ray, runs can be kept at a URL: "
                "give it with --store"
            )
        if self.ray is None:
            if self.store is not None:
                raise ValueError("--store needs --ray; without it, results go to --out alone")
            return make_backend(self.out, self.workers, self.checkpoint_seconds)
        if self.workers != 1:
            raise ValueError(
                "--ray and --workers exclude each other: Ray runs as many cells at once as there "
                "are CPUs for; set --threads to the CPUs that each of them gets"
            )
        from moetta.bench.ray_backend import OnRay  # Ray is an extra

        return OnRay(self.out, self.address, self.store, self.checkpoint_seconds)

    @property
    def address(self) -> str | None:
        """The Ray cluster to use; None to start Ray on this machine."""
        return None if self.ray == HERE else self.ray

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Run cells and show their progress; under torchrun, one cell on all ranks."""
        if spread.launched() > 1:
            return self._run_spread(cells)
        backend = self.backend()
        with make_display(self.json) as display:
            return run_grid(cells, self.out, listener=display, backend=backend)

    def _run_spread(self, cells: Sequence[Cell]) -> list[Outcome]:
        if self.ray is not None:
            raise ValueError(
                "--ray spreads a grid of runs, torchrun the batches of one run: use one of the two"
            )
        cell = spread.check(cells, self.workers)
        ranks = spread.join(cell.device)
        follower = ranks.rank > 0
        if follower:  # the first rank says the same
            warnings.simplefilter("ignore")
            logging.getLogger("moetta").setLevel(logging.ERROR)
        with Display() if follower else make_display(self.json) as display:
            outcome = spread.run_spread(cell, self.out, ranks, display, self.checkpoint_seconds)
        if not follower:
            return [outcome] * len(cells)
        if outcome.error is None:
            raise SystemExit(0)  # the first rank shows the results
        raise ValueError(outcome.error)


def cell_fields(options: Running) -> dict[str, Any]:
    """The fields of a cell among a command's options, under the same names."""
    given = {f.name for f in fields(options)}
    names = [f.name for f in fields(CellOptions) if f.name in given]
    return {name: getattr(options, name) for name in names}


def expand_methods(names: Sequence[str]) -> list[str]:
    """Method names, with each group (``all``, ``paper``, or a group of methods) spelt out."""
    known, chosen = list_methods(), list[str]()
    for name in names:
        if name == "all":
            chosen += known
        elif name == "paper":
            chosen += PAPER_METHODS
        else:
            grouped = [m.name for m in known.values() if m.group == name]
            chosen += [name] if name in known else grouped or [name]
    return list(dict.fromkeys(chosen))


def only_grouped(names: Sequence[str]) -> set[str]:
    """The methods that come from a group alone; nobody asked for one of them in particular."""
    return set(expand_methods(names)) - set(names)


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the HTML page of some runs."""
    from moetta.commands.report import make_report  # matplotlib takes a while to load

    return make_report(folders, out, title=title)
