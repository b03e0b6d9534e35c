"""The benchmark: grids of cells, resumable; each run has a card that says what was run."""

from moetta.bench.cell import Cell
from moetta.bench.grid import make_grid, run_grid

__all__ = ["Cell", "make_grid", "run_grid"]
