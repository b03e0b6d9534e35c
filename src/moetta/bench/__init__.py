"""The benchmark: grids of runs, resumable, each with its protocol card; the paper's experiments."""

from moetta.bench.cell import Cell, grid
from moetta.bench.results import Group, Run, aggregate, load_runs, protocol_key
from moetta.bench.runner import run_grid

__all__ = ["Cell", "Group", "Run", "aggregate", "grid", "load_runs", "protocol_key", "run_grid"]
