"""The paper: what it ran, its published results, and its experiments as grids of cells."""
