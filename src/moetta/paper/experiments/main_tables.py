"""Tables 1 and 2 and the larger model: accuracy and cost of all methods."""

from __future__ import annotations

from pathlib import Path

from moetta.bench.cell import Cell
from moetta.paper.beside import printed_accuracy
from moetta.paper.experiments.workload import (
    SEEDS,
    Experiment,
    Found,
    Workload,
    pick,
)
from moetta.paper.published import METHODS, by_method, counterpart, published
from moetta.results.tables import Column, Entry, Table, beside, beside_columns, table


def _methods(workload: Workload) -> list[str]:
    """The rows of a table: the paper's methods in its order, then the others."""
    wanted = METHODS if workload.methods is None else workload.methods
    return [m for m in METHODS if m in wanted] + [m for m in wanted if m not in METHODS]


def _marked(methods: list[str]) -> list[str]:
    """The note that tells the paper's methods from the others, if there are others."""
    others = [method for method in methods if method not in METHODS]
    return [f"Not in the paper: {', '.join(others)}."] if others else []


def _accuracies(workload: Workload, found: Found, name: str, section: str) -> list[Table]:
    """One table per model: methods by streams, each next to the paper's number."""
    made = []
    for model in workload.models:
        key = "vit_large" if section == "scalability" else counterpart(model)
        named = f" beside the paper's {key}" if key else ""
        rows, methods = [], _methods(workload)
        for method in methods:
            row = [Entry(method)]
            for stream in workload.streams:
                ours = pick(found, model=model, method=method, stream=stream)
                row += beside(ours, printed_accuracy(key, stream, method))
            rows.append(row)
        columns = [Column("method")]
        for stream in workload.streams:
            columns += beside_columns(stream)
        caption = f"{model}{named}: accuracy over the stream"
        short = Path(model).name  # a model may be a folder
        notes = [workload.caveat(model, mgtta="mgtta" in methods), *_marked(methods)]
        made.append(table(f"{name}-{short}", caption, columns, rows, notes))
    return made


def _table1_cells(workload: Workload) -> list[Cell]:
    methods = _methods(workload)
    return workload.cells("table1", SEEDS, stream=list(workload.streams), method=methods)


def _table1(workload: Workload, found: Found, _: Path) -> list[Table]:
    return _accuracies(workload, found, "table1", "table1")


def _large_cells(workload: Workload) -> list[Cell]:
    methods = _methods(workload)
    return workload.cells("scalability", (42,), stream=list(workload.streams), method=methods)


def _large(workload: Workload, found: Found, _: Path) -> list[Table]:
    return _accuracies(workload, found, "scalability", "scalability")


_COSTS = ("activated_m", "forward", "backward", "time")


def _table2_cells(workload: Workload) -> list[Cell]:
    return workload.cells(
        "table2",
        (42,),
        stream=workload.richest,
        method=_methods(workload),
        model=workload.models[0],
    )


def _table2(workload: Workload, found: Found, _: Path) -> list[Table]:
    rows, methods = [], _methods(workload)
    for method in methods:
        group = pick(found, method=method)
        row = [Entry(method)]
        for name in _COSTS:
            ours = None
            if group is not None:
                figure = {"activated_m": "activated_parameters", "time": "time_ratio"}.get(name)
                figure = figure or f"{name}s"
                value = group.stat("cost", figure, complete=True)
                images = group.stat("samples")
                if value is not None and images is not None:
                    scale = {"activated_m": 1e-6, "time": 100.0}.get(name, 100 / images.mean)
                    ours = value.mean * scale
            paper = by_method(published()["table2"], name, method)
            gap = None if ours is None or paper is None else ours - paper
            row += [Entry(ours), Entry(paper), Entry(gap, signed=True)]
        rows.append(row)
    columns = [Column("method")]
    for title, unit, digits in (
        ("activated parameters", "M", 3),
        ("forward", "% of images", 0),
        ("backward", "% of images", 0),
        ("time", "% of noadapt", 0),
    ):
        columns += [Column(title, f"{unit}, {whose}", digits) for whose in ("ours", "paper")]
        columns += [Column(title, "ours - paper", digits)]
    caption = f"Cost on {workload.richest}, {workload.models[0]} beside the paper's vit_base"
    device = workload.common.get("device", "cpu")
    timed = (
        f"Times were measured on {device}, each method alternating with noadapt on the same "
        "batches (medians); the paper's on a V100 GPU."
    )
    return [
        table(
            "table2",
            caption,
            columns,
            rows,
            [
                workload.caveat(workload.models[0], mgtta="mgtta" in methods),
                timed,
                *_marked(methods),
            ],
        )
    ]


TABLE1 = Experiment("all methods on three streams", _table1_cells, _table1, any_methods=True)
TABLE2 = Experiment("what the methods cost", _table2_cells, _table2, any_methods=True)
SCALABILITY = Experiment("all methods on a larger model", _large_cells, _large, any_methods=True)
