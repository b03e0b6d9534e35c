"""The paper's experiments, and one on length: what to run, and how to show the results."""

from moetta.paper.experiments.embedding import TSNE_FIGURE
from moetta.paper.experiments.experts import HEATMAPS, SIMILARITY
from moetta.paper.experiments.gradients import GRADIENT_COSINE
from moetta.paper.experiments.length import LENGTH
from moetta.paper.experiments.main_tables import SCALABILITY, TABLE1, TABLE2
from moetta.paper.experiments.sweeps import GRID_SEARCH, PARTIAL, SENSITIVITY, TABLE3
from moetta.paper.experiments.theory import THEORY
from moetta.paper.experiments.workload import Experiment, Workload

EXPERIMENTS: dict[str, Experiment] = {
    "table1": TABLE1,
    "table2": TABLE2,
    "table3": TABLE3,
    "scalability": SCALABILITY,
    "grid-search": GRID_SEARCH,
    "gradient-cosine": GRADIENT_COSINE,
    "tsne": TSNE_FIGURE,
    "expert-similarity": SIMILARITY,
    "expert-heatmaps": HEATMAPS,
    "partial-replacement": PARTIAL,
    "sensitivity": SENSITIVITY,
    "theory": THEORY,
    "length": LENGTH,
}

OURS = ("length",)
"""The experiments that are not in the paper."""

__all__ = ["EXPERIMENTS", "OURS", "Experiment", "Workload"]
