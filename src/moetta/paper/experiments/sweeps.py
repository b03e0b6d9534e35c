"""MoETTA's ablations and sweeps, and the learning rates of the other methods."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from moetta import figures
from moetta.bench.cell import Cell, resolve_config
from moetta.methods.moetta import MoETTAConfig, indexed_norms
from moetta.paper.experiments.workload import (
    Experiment,
    Found,
    Workload,
    pick,
)
from moetta.paper.published import published
from moetta.results import Printed
from moetta.results.tables import (
    Column,
    Entry,
    Table,
    beside,
    beside_columns,
    entry,
    table,
)
from moetta.zoo.by_name import load_architecture

ABLATIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "full": (),
    "no_sample_selection": (("select", False),),
    "no_entropy_reweight": (("reweight", False),),
    "no_load_balancing": (("balance", 0.0),),
    "no_grad_to_router": (("router_grad", False),),
    "no_samplewise_router": (("routing", "batch"),),
    "no_moe_layernorm": (("moe", False),),
    "no_layerwise_router": (("router_scope", "model"),),
}


def _moetta(
    workload: Workload, experiment: str, stream: Any, variant: str | None, **changes: Any
) -> list[Cell]:
    return workload.cells(
        experiment,
        (42,),
        model=workload.models[0],
        method="moetta",
        stream=stream,
        variant=variant,
        overrides=tuple(changes.items()),
    )


def _table3_cells(workload: Workload) -> list[Cell]:
    streams = list(workload.streams)
    return [
        cell
        for name, overrides in ABLATIONS.items()
        for cell in _moetta(
            workload, "table3", streams, None if name == "full" else name, **dict(overrides)
        )
    ]


def _table3(workload: Workload, found: Found, _: Path) -> list[Table]:
    rows = []
    for name in ABLATIONS:
        row = [Entry(name.replace("_", " "))]
        printed = published()["table3"][name]
        means = []
        for place, stream in enumerate(workload.streams):
            ours = pick(found, stream=stream, variant=None if name == "full" else name)
            row += beside(ours, Printed(printed[place]))
            means += [ours.accuracy.mean] if ours else []
        mean = statistics.fmean(means) if len(means) == len(workload.streams) else None
        gap = None if mean is None else mean - printed[3]
        row += [Entry(mean), Entry(printed[3]), Entry(gap, signed=True)]
        rows.append(row)
    columns = [Column("MoETTA")]
    for stream in workload.streams:
        columns += beside_columns(stream)
    columns += beside_columns("average")
    caption = f"Ablations of MoETTA, {workload.models[0]} beside the paper's vit_base"
    return [table("table3", caption, columns, rows, [workload.ours])]


EXPERTS = (3, 6, 9, 12)
LAMBDAS = (0.05, 0.2, 0.5, 1.0)


def _sensitivity_cells(workload: Workload) -> list[Cell]:
    return [
        cell
        for experts in EXPERTS
        for balance in LAMBDAS
        for cell in _moetta(
            workload,
            "sensitivity",
            workload.classical,
            f"experts={experts},balance={balance:g}",
            experts=experts,
            balance=balance,
        )
    ]


def _sensitivity(workload: Workload, found: Found, folder: Path) -> list[Table]:
    values: list[list[float | None]] = []
    rows = []
    for experts in EXPERTS:
        groups = [pick(found, variant=f"experts={experts},balance={b:g}") for b in LAMBDAS]
        values.append([None if g is None else g.accuracy.mean for g in groups])
        entries = [entry(g.accuracy if g else None) for g in groups]
        rows.append([Entry(f"{experts} experts"), *entries])
    columns = [Column("MoETTA"), *(Column(f"lambda {b:g}", "%") for b in LAMBDAS)]
    names = [f"{e}" for e in EXPERTS], [f"{b:g}" for b in LAMBDAS]
    drawn = figures.heat_map(values, *names, x="lambda", y="experts", label="accuracy %")
    figures.save(drawn, folder / "sensitivity")
    caption = f"Experts and balance weight, {workload.models[0]}, {workload.classical}"
    printed = f"The paper's figure: {published()['figures']['sensitivity']}."
    return [table("sensitivity", caption, columns, rows, [workload.ours, printed])]


def _layers(workload: Workload) -> int:
    _, config = resolve_config(Cell("moetta", workload.classical, workload.models[0]))
    assert isinstance(config, MoETTAConfig)
    model = load_architecture(workload.models[0])  # its weights may be gone, and do not matter
    return len(indexed_norms(model, config.channels_first))


def _spans(layers: int) -> list[tuple[str, str]]:
    """Name and `frozen` of every span: none, 0..k for all k, k..last for all k."""
    last = layers - 1
    shallow = [(f"frozen 0-{k}", f"0-{k}") for k in range(last)]
    deep = [(f"frozen {k}-{last}", f"{k}-{last}") for k in range(1, layers)]
    return [("all replaced", ""), *shallow, *deep]


def _partial_cells(workload: Workload) -> list[Cell]:
    return [
        cell
        for name, frozen in _spans(_layers(workload))
        for cell in _moetta(
            workload, "partial-replacement", workload.classical, name, frozen=frozen
        )
    ]


def _partial(workload: Workload, found: Found, folder: Path) -> list[Table]:
    layers = _layers(workload)
    rows, full = [], pick(found, variant="all replaced")
    curves: dict[str, tuple[list[float], list[float]]] = {
        "0..k frozen": ([], []),
        "k..last frozen": ([], []),
    }
    for name, frozen in _spans(layers):
        ours = pick(found, variant=name)
        gap = None if ours is None or full is None else ours.accuracy.mean - full.accuracy.mean
        rows.append([Entry(name), entry(ours.accuracy if ours else None), Entry(gap, signed=True)])
        if frozen and ours is not None:
            first, end = frozen.split("-")
            label, k = ("0..k frozen", end) if first == "0" else ("k..last frozen", first)
            curves[label][0].append(float(k))
            curves[label][1].append(ours.accuracy.mean)
    figures.save(figures.lines(curves, "k", "accuracy %"), folder / "partial-replacement")
    columns = [Column("layers"), Column("accuracy", "%", best="high"), Column("vs all replaced")]
    caption = f"Which of the {layers} norm layers get experts, {workload.models[0]}"
    printed = f"The paper's figure: {published()['figures']['partial_replacement']}."
    return [table("partial-replacement", caption, columns, rows, [workload.ours, printed])]


def _rates(workload: Workload, method: str) -> dict[float, float]:
    """The paper's learning rates, and ours: the same multiples of the rate chosen for the model."""
    printed = {float(rate): float(acc) for rate, acc in published()["grid_search"][method].items()}
    best = max(printed, key=lambda rate: printed[rate])
    cell = Cell(method, workload.classical, workload.models[0])
    chosen = float(resolve_config(cell)[1].to_dict()["lr"]) if workload.data is None else best
    return {rate: float(f"{rate * chosen / best:.6g}") for rate in printed}


def _grid_cells(workload: Workload) -> list[Cell]:
    return [
        cell
        for method in published()["grid_search"]
        for rate in _rates(workload, method).values()
        for cell in workload.cells(
            "grid-search",
            (42,),
            model=workload.models[0],
            method=method,
            stream=workload.classical,
            variant=f"lr={rate:g}",
            overrides=(("lr", rate),),
        )
    ]


def _grid(workload: Workload, found: Found, _: Path) -> list[Table]:
    made = []
    for method, printed in published()["grid_search"].items():
        accuracy = {float(rate): float(value) for rate, value in printed.items()}
        rows = []
        for theirs, mine in _rates(workload, method).items():
            ours = pick(found, method=method, variant=f"lr={mine:g}")
            rows.append(
                [Entry(f"{mine:g}"), Entry(f"{theirs:g}"), *beside(ours, Printed(accuracy[theirs]))]
            )
        columns = [Column("lr, ours"), Column("lr, paper"), *beside_columns("accuracy")]
        caption = f"Learning rates of {method}, {workload.models[0]}, {workload.classical}"
        notes = [workload.ours]
        if workload.data is None:
            notes.append(
                "Our rates are the paper's times a factor that turns its best rate into ours."
            )
        made.append(table(f"grid-search-{method}", caption, columns, rows, notes))
    return made


TABLE3 = Experiment("MoETTA without each of its parts", _table3_cells, _table3)
SENSITIVITY = Experiment("number of experts and balance weight", _sensitivity_cells, _sensitivity)
PARTIAL = Experiment("which norm layers get experts", _partial_cells, _partial)
GRID_SEARCH = Experiment("learning rates of the compared methods", _grid_cells, _grid)
