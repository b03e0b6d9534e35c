"""What an experiment is: cells to run, and a way to set their results beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetta.bench.cell import Cell, grid
from moetta.data.datasets import has_imagenet_c
from moetta.paper.published import PAPER_MODELS
from moetta.results.runs import Group, Run, group
from moetta.results.tables import Cell as Entry
from moetta.results.tables import Column, Table

SEEDS = (42, 4242, 424242)
EMBEDDED_MODELS = ("digits-vit", "digits-convnext")
STREAMS = ("classical", "potpourri", "potpourri+")
Found = Mapping[Cell, Run]


@dataclass(frozen=True)
class Setting:
    """On what an experiment runs.

    Attributes:
        models: the first is the ViT of the experiments that use one model.
        data: folder of the data sets; None is the embedded benchmark.
        seeds: seeds; None is the experiment's own choice.
        common: further fields of all cells.
    """

    models: tuple[str, ...] = EMBEDDED_MODELS
    data: str | None = None
    seeds: tuple[int, ...] | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams: the paper's three, or CIFAR-10's one for CIFAR-10's models."""
        return ("cifar10-c",) if self.models[0].startswith("cifar") else STREAMS

    @property
    def classical(self) -> str:
        """The stream of corruptions alone."""
        return self.streams[0]

    @property
    def richest(self) -> str:
        """Potpourri+, or the nearest there is."""
        return self.streams[-1]

    def cells(self, experiment: str, seeds: Sequence[int], **axes: Any) -> list[Cell]:
        """A grid on this setting's data; its models and seeds unless the axes say otherwise."""
        fields = {
            "model": list(self.models),
            "seed": list(self.seeds or seeds),
            "data": self.data,
            "experiment": experiment,
            **self.common,
        }
        return grid(**{**fields, **axes})

    @property
    def ours(self) -> str:
        """What the results say of their data and weights, next to the paper's figures."""
        if self.data is None:
            return (
                "Not the paper's data or weights: the embedded benchmark (two-digit numbers, 100 "
                f"classes, 32 x 32 pixels) and {', '.join(self.models)}. The paper's figures stand "
                "beside ours to compare the order of methods, not the level."
            )
        remarks = []
        foreign = [model for model in self.models if model not in PAPER_MODELS]
        if foreign:
            remarks.append(f"{', '.join(foreign)} are not the paper's models")
        if self.common.get("weights"):
            remarks.append("the weights come from a local file")
        if self.streams != STREAMS:
            remarks.append("CIFAR-10 is not the paper's data")
        elif not has_imagenet_c(Path(self.data)):
            remarks.append(
                "ImageNet-C was made on the fly from the validation images, with our own frost "
                "and without its second JPEG compression"
            )
        if self.common.get("batch_size") not in (None, 64):
            remarks.append(f"batches hold {self.common['batch_size']} images, the paper's 64")
        if self.common.get("limit"):
            remarks.append(f"only {self.common['limit']:,} images of each stream were used")
        if self.common.get("partial"):
            remarks.append("data sets may lack images")
        generator = "MGTTA's generator is our own, trained on digits-vit."
        if not remarks:
            return (
                "Data sets and model names are the paper's; see the cards for hashes and counts. "
                + generator
            )
        text = "; ".join(remarks)
        return f"{text[0].upper()}{text[1:]}: the paper's figures are for orientation. {generator}"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        title: what it shows.
        cells: what has to be run.
        present: makes tables of the results; pictures go to the folder.
    """

    title: str
    cells: Callable[[Setting], list[Cell]]
    present: Callable[[Setting, Found, Path], list[Table]]


def no_cells(_: Setting) -> list[Cell]:
    """For experiments that are no grid."""
    return []


def pick(found: Found, **wanted: Any) -> Group | None:
    """The runs, over seeds, of the cells with these fields; None if there are none."""
    runs = [
        run
        for cell, run in found.items()
        if all(getattr(cell, name) == value for name, value in wanted.items())
    ]
    return group(runs) if runs else None


def beside(ours: Group | None, paper: float | None, paper_sd: float | None = None) -> list[Entry]:
    """Three entries: ours, the paper's, the difference."""
    mean = None if ours is None else ours.mean
    gap = None if mean is None or paper is None else mean - paper
    return [
        Entry(mean, None if ours is None else ours.sd),
        Entry(paper, paper_sd),
        Entry(gap, signed=True),
    ]


def three_columns(name: str) -> list[Column]:
    """Headers of what `beside` gives."""
    return [
        Column(name, "ours %", best="high"),
        Column(name, "paper %"),
        Column(name, "ours - paper"),
    ]
