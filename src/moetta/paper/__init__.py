"""The paper: what it ran, the figures it prints, and its experiments as grids of our own."""
