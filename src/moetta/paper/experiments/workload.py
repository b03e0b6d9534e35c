"""What an experiment is: cells to run, and a way to present their results next to the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetta.bench.cell import Cell
from moetta.bench.grid import make_grid
from moetta.data.catalogue import compared_streams, stream_spec
from moetta.data.datasets import has_imagenet_c
from moetta.paper.beside import caveat
from moetta.results import Group, Run, make_group
from moetta.results.tables import Table
from moetta.zoo.recipes import RECIPES

SEEDS = (42, 4242, 424242)
EMBEDDED_MODELS = ("digits-vit", "digits-convnext")
Found = Mapping[Cell, Run]


@dataclass(frozen=True)
class Workload:
    """What an experiment runs on.

    Attributes:
        models: experiments that use one model take the first.
        data: folder of the data sets; None is the embedded benchmark.
        seeds: seeds; None leaves the choice to the experiment.
        methods: methods to compare; None leaves the choice to the experiment.
        common: other fields of all cells.
    """

    models: tuple[str, ...] = EMBEDDED_MODELS
    data: str | None = None
    seeds: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that can be compared with the paper's, for the data the first model knows."""
        shipped = RECIPES.get(self.models[0])
        return compared_streams("val" if shipped is None else shipped.data)

    @property
    def classical(self) -> str:
        """The stream of corruptions alone."""
        return self.streams[0]

    @property
    def richest(self) -> str:
        """Potpourri+, or the most varied stream there is."""
        return self.streams[-1]

    def cells(self, experiment: str, seeds: Sequence[int], **axes: Any) -> list[Cell]:
        """A grid on this workload's data, with its models and seeds unless ``axes`` has others."""
        fields = {
            "model": list(self.models),
            "seed": list(self.seeds or seeds),
            "data": self.data,
            "experiment": experiment,
            **self.common,
        }
        return make_grid(**{**fields, **axes})

    @property
    def ours(self) -> str:
        """The caveat for the experiments that use one model."""
        return self.caveat(self.models[0])

    def caveat(self, model: str, mgtta: bool = False) -> str:
        """How data and weights differ from the paper's, for the note under a table.

        Args:
            model: the model in the table.
            mgtta: whether MGTTA is in the table.
        """
        remarks = []
        if self.common.get("weights"):
            remarks.append("the weights come from a local file")
        imagenet = self.data is not None and "c" in stream_spec(self.classical, self.data).parts
        if imagenet and not has_imagenet_c(Path(str(self.data))):
            remarks.append(
                "ImageNet-C was generated on the fly from the validation images, with our own "
                "frost and without its second JPEG compression"
            )
        if self.common.get("batch_size") not in (None, 64):
            remarks.append(f"our batches hold {self.common['batch_size']} images, the paper's 64")
        if self.common.get("limit"):
            remarks.append(f"only {self.common['limit']:,} images of each stream were used")
        if self.common.get("partial"):
            remarks.append("data sets may lack images")
        prefix = "embedded-" if self.data is None else ""
        text = caveat(model, {f"{prefix}{name}": None for name in self.streams}, remarks)
        text = text or "The data sets and the model have the paper's names; see the cards for both."
        return f"{text} MGTTA's generator is our own, trained on digits-vit." if mgtta else text


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        title: what it shows.
        cells: what has to be run.
        present: makes tables of the results, and writes figures to the folder.
        any_methods: whether it can compare other methods than its own choice.
    """

    title: str
    cells: Callable[[Workload], list[Cell]]
    present: Callable[[Workload, Found, Path], list[Table]]
    any_methods: bool = False


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
    return make_group(runs) if runs else None
