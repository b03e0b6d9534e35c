"""The domains of a setting's streams, one by one: for experiments that are no grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moetta.bench.cell import Cell
from moetta.bench.protocol import Prepared, prepare, preprocessing
from moetta.data import Domain, Stream, embedded
from moetta.data.named_streams import stream_options
from moetta.paper.experiments.setting import Setting


def prepared(setting: Setting, experiment: str, stream: str, method: str = "noadapt") -> Prepared:
    """The setting's ViT on a stream, without a limit: domains are limited one by one."""
    (cell,) = setting.cells(
        experiment,
        (42,),
        model=setting.models[0],
        seed=(setting.seeds or (42,))[0],
        method=method,
        stream=stream,
    )
    return prepare(replace(cell, limit=None))


def single(made: Prepared, domains: Sequence[Domain], limit: int | None) -> Stream:
    """Some domains of a prepared stream as a stream of their own, as the model wants them."""
    cell = made.cell
    samples = sum(map(len, domains))
    return Stream(
        domains,
        seed=cell.seed,
        batch_size=made.stream.batch_size,
        limit=None if limit is None else min(limit, samples),
        workers=cell.loaders,
        **_picture_options(cell, made),
    )


def _picture_options(cell: Cell, made: Prepared) -> dict[str, Any]:
    if cell.data is None:
        return {"normalise": (embedded.MEAN, embedded.STD)}
    return stream_options(preprocessing(cell, made.model))
