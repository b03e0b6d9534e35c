"""What an experiment is: cells to run, and a way to show their results next to the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetta.bench.cell import Cell
from moetta.bench.grid import make_grid
from moetta.data.datasets import IMAGENET_C_FOLDERS
from moetta.data.images import named
from moetta.paper.published import PAPER_MODELS
from moetta.results.runs import Group, Run, group
from moetta.results.tables import Cell as Entry
from moetta.results.tables import Column, Table

SEEDS = (42, 4242, 424242)
EMBEDDED_MODELS = ("digits-vit", "digits-convnext")
STREAMS = ("classical", "potpourri", "potpourri+")
Found = Mapping[Cell, Run]


@dataclass(frozen=True)
class Workload:
    """What an experiment runs on.

    Attributes:
        models: experiments that use one model take the first.
        data: folder of the data sets; None is the embedded benchmark.
        seeds: seeds; None leaves the choice to the experiment.
        common: other fields of all cells.
    """

    models: tuple[str, ...] = EMBEDDED_MODELS
    data: str | None = None
    seeds: tuple[int, ...] | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[str, ...]:
        """The paper's three streams, or the one of CIFAR-10 for its models."""
        return ("cifar10-c",) if self.models[0].startswith("cifar") else STREAMS

    @property
    def classical(self) -> str:
        """The stream of corruptions alone."""
        return self.streams[0]

    @property
    def richest(self) -> str:
        """Potpourri+, or the nearest that exists."""
        return self.streams[-1]

    def cells(self, experiment: str, seeds: Sequence[int], **axes: Any) -> list[Cell]:
        """A grid on this workload's data, with its models and seeds unless the axes differ."""
        fields = {
            "model": list(self.models),
            "seed": list(self.seeds or seeds),
            "data": self.data,
            "experiment": experiment,
            **self.common,
        }
        return make_grid(**{**fields, **axes})

    def note(self, *models: str, mgtta: bool = False) -> str:
        """How our data and weights differ from the paper's, for the foot of a table.

        Args:
            models: the models in the table.
            mgtta: whether MGTTA is in the table.
        """
        if self.data is None:
            return (
                "Not the paper's data or weights: the embedded benchmark (two-digit numbers, 100 "
                f"classes, 32 x 32 pixels) and {', '.join(models)}. Compare the order of the "
                "methods with the paper's, not the level."
            )
        generator = "MGTTA's generator is our own, trained on digits-vit." if mgtta else ""
        remarks = self._differences(models)
        if not remarks:
            same = "Data sets and models are the paper's; see the cards for hashes and counts."
            return f"{same} {generator}".rstrip()
        text = "; ".join(remarks)
        text = f"{text[0].upper()}{text[1:]}: the paper's numbers are for orientation only."
        return f"{text} {generator}".rstrip()

    def _differences(self, models: Sequence[str]) -> list[str]:
        remarks = []
        foreign = [model for model in models if model not in PAPER_MODELS]
        if foreign:
            verb = "is not a model" if len(foreign) == 1 else "are not models"
            remarks.append(f"{', '.join(foreign)} {verb} of the paper")
        if self.common.get("weights"):
            remarks.append("the weights come from a local file")
        if self.streams != STREAMS:
            remarks.append("CIFAR-10 is not the paper's data")
        elif not named(Path(str(self.data)), IMAGENET_C_FOLDERS):
            remarks.append(
                "ImageNet-C was generated on the fly from the validation images, with our own "
                "frost and without its second JPEG compression"
            )
        if self.common.get("batch_size") not in (None, 64):
            remarks.append(f"batches hold {self.common['batch_size']} images, the paper's 64")
        if self.common.get("limit"):
            remarks.append(f"only {self.common['limit']:,} images of each stream were used")
        if self.common.get("partial"):
            remarks.append("data sets may lack images")
        return remarks


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        title: what it shows.
        cells: what has to be run.
        present: makes tables of the results, and writes figures to the folder.
    """

    title: str
    cells: Callable[[Workload], list[Cell]]
    present: Callable[[Workload, Found, Path], list[Table]]


def no_cells(_: Workload) -> list[Cell]:
    """For experiments without a grid."""
    return []


def pick(found: Found, **wanted: Any) -> Group | None:
    """The group of runs whose cells have these values; None if there are none."""
    runs = [
        run
        for cell, run in found.items()
        if all(getattr(cell, name) == value for name, value in wanted.items())
    ]
    return group(runs) if runs else None


def beside(ours: Group | None, paper: float | None, paper_sd: float | None = None) -> list[Entry]:
    """Three entries: our number, the paper's, the difference."""
    mean = None if ours is None else ours.mean
    gap = None if mean is None or paper is None else mean - paper
    return [
        Entry(mean, None if ours is None else ours.sd),
        Entry(paper, paper_sd),
        Entry(gap, signed=True),
    ]


def three_columns(name: str) -> list[Column]:
    """The columns that `beside` fills."""
    return [
        Column(name, "ours %", best="high"),
        Column(name, "paper %"),
        Column(name, "ours - paper"),
    ]
