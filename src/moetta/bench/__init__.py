"""The benchmark: grids of runs, resumable, each with its protocol card; the paper's experiments."""

from moetta.bench.cell import Cell, grid
from moetta.bench.grid import run_grid
from moetta.results import Group, Run, aggregate, load_runs, protocol_key

__all__ = ["Cell", "Group", "Run", "aggregate", "grid", "load_runs", "protocol_key", "run_grid"]
