"""The domains of a stream one by one, for experiments without a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moetta.bench.cell import BASELINE, Cell
from moetta.bench.protocol import Prepared, prepare, preprocessing
from moetta.data import Domain, Stream, embedded
from moetta.data.named_streams import stream_options
from moetta.paper.experiments.workload import Workload


def single_cell(workload: Workload, experiment: str, stream: str, method: str = BASELINE) -> Cell:
    """A method with the workload's first model and seed on a stream."""
    (cell,) = workload.cells(
        experiment,
        (42,),
        model=workload.models[0],
        seed=(workload.seeds or (42,))[0],
        method=method,
        stream=stream,
    )
    return cell


def prepare_whole(cell: Cell) -> Prepared:
    """A cell ready to run, without its limit: domains are limited one by one."""
    return prepare(replace(cell, limit=None))


def domain_stream(made: Prepared, domains: Sequence[Domain], limit: int | None) -> Stream:
    """Some domains of a prepared stream as a separate stream, as the model expects them."""
    cell = made.cell
    samples = sum(map(len, domains))
    return Stream(
        domains,
        seed=cell.seed,
        batch_size=made.stream.batch_size,
        limit=None if limit is None else min(limit, samples),
        workers=cell.loaders,
        **_image_options(cell, made),
    )


def _image_options(cell: Cell, made: Prepared) -> dict[str, Any]:
    if cell.data is None:
        return {"normalise": (embedded.MEAN, embedded.STD)}
    return stream_options(preprocessing(cell, made.model))
