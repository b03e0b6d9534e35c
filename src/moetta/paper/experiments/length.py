"""When adaptation helps, peaks and falls: the gain against the number of images seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetta import figures
from moetta.bench.cell import BASELINE, Cell, resolve_config
from moetta.paper.experiments.workload import Experiment, Found, Workload, pick
from moetta.results import Column, Entry, Group, Table, entry, table
from moetta.results.courses import Course, best_stop, course, quarters
from moetta.results.groups import Stat

METHODS = ("tent", "eata", "sar", "deyo", "mgtta", "roid", "moetta", "moetta_plus")
"""The methods that are compared unless others are named: one of each kind that learns."""
FACTORS = (1 / 3, 1.0, 3.0)
"""The rates that are tried, as multiples of the one chosen for the model."""
EXPERTS: dict[str, dict[str, Any]] = {
    "1 expert": {"experts": 1},
    "3 experts": {"experts": 3},
    "no experts": {"moe": False},
}
"""MoETTA with fewer experts than its usual nine."""
LONGER = 10  # an embedded stream is made this many times as long as usual


@dataclass(frozen=True)
class Line:
    """One line of the figure: a method at a rate, or MoETTA with fewer experts."""

    method: str
    rate: float | None
    factor: float
    experts: str | None = None

    @property
    def variant(self) -> str | None:
        """The name of its runs."""
        rate = None if self.rate is None else f"lr={self.rate:g}"
        return f"{self.experts}, {rate}" if self.experts else rate

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of its configuration."""
        rate = {} if self.rate is None else {"lr": self.rate}
        return rate | (EXPERTS[self.experts] if self.experts else {})


def _lines(workload: Workload) -> Iterator[Line]:
    """The lines, in the order of the table."""
    methods = [name for name in workload.methods or METHODS if name != BASELINE]
    for method in methods:
        yield from _at_rates(workload, method)
    for experts in EXPERTS if "moetta" in methods else ():
        yield from _at_rates(workload, "moetta", experts)


def _at_rates(workload: Workload, method: str, experts: str | None = None) -> Iterator[Line]:
    rate = _rate(workload, method)
    if rate is None:
        yield Line(method, None, 1.0)
        return
    for factor in FACTORS:
        yield Line(method, float(f"{rate * factor:.2g}"), factor, experts)


def _rate(workload: Workload, method: str) -> float | None:
    """The learning rate that is chosen for the first model; None if the method has none."""
    cell = Cell(method, workload.classical, workload.models[0], data=workload.data)
    rate = resolve_config(cell)[1].to_dict().get("lr")
    return None if rate is None else float(rate)


def _length(workload: Workload) -> int | None:
    """How many images; None is the whole stream."""
    given = workload.common.get("length")
    if given is not None or workload.common.get("limit") is not None:
        return None if given is None else int(given)
    return 14_400 * LONGER if workload.data is None else None


def _length_cells(workload: Workload) -> list[Cell]:
    fixed: dict[str, Any] = {
        "model": workload.models[0],
        "stream": workload.classical,
        "length": _length(workload),
    }
    made = workload.cells("length", (42,), method=BASELINE, **fixed)
    for line in _lines(workload):
        made += workload.cells(
            "length",
            (42,),
            method=line.method,
            variant=line.variant,
            overrides=tuple(line.overrides.items()),
            **fixed,
        )
    return made


def _length_tables(workload: Workload, found: Found, folder: Path) -> list[Table]:
    unadapted = pick(found, method=BASELINE)
    rows, drawn = [], dict[str, tuple[list[float], list[float]]]()
    apart = dict[str, tuple[list[float], list[float]]]()
    for line in _lines(workload):
        group = pick(found, method=line.method, variant=line.variant)
        seen = None if group is None else course(group, unadapted)
        rows.append(_row(line, group, seen))
        if group is None or seen is None:
            continue
        points = (seen.mean.images.tolist(), seen.mean.so_far.tolist())
        if line.experts is None and line.factor == 1:
            drawn[line.method] = points
        if line.method == "moetta" and line.factor >= 1:
            name = line.experts or f"{_experts(group)} experts"
            apart[f"{name}, lr {line.rate:g}"] = points
    for name, curves in (("length", drawn), ("length-experts", apart)):
        if curves:
            figure = figures.lines(curves, "images seen", "gain so far, points")
            figures.save(figure, folder / name)
    columns = [
        Column("method"),
        Column("lr"),
        Column("gain", digits=2, best="high"),
        *(Column(f"quarter {q}", digits=1) for q in (1, 2, 3, 4)),
        Column("best stop, images", digits=0),
        Column("images per expert", digits=0),
    ]
    base = "" if unadapted is None else f", {unadapted.accuracy.mean:.2f} % without adaptation"
    caption = f"Gain over the stream, {workload.models[0]}, {workload.classical}{base}"
    notes = [
        "Gain in points over the source model on the same images. The best stop is where the "
        "adapted model is furthest ahead in right answers, known only in hindsight; images per "
        "expert are those up to there, divided by the number of experts.",
        workload.ours,
    ]
    return [table("length", caption, columns, rows, notes)]


def _row(line: Line, group: Group | None, seen: Course | None) -> list[Entry]:
    name = Entry(f"{line.method}, {line.experts}" if line.experts else line.method)
    rate = Entry(None if line.rate is None else f"{line.rate:g}")
    if group is None or seen is None:
        return [name, rate, *[Entry(None)] * 7]
    gain = group.stat("gain", scale=100, complete=True) or Stat((float(seen.mean.so_far[-1]),))
    stop, experts = best_stop(seen.mean), _experts(group)
    return [
        name,
        rate,
        entry(gain),
        *(Entry(value, signed=True) for value in quarters(seen.mean)),
        Entry(stop),
        Entry(stop / experts if experts > 1 else None),
    ]


def _experts(group: Group) -> int:
    settings = group.first.settings
    if settings.get("moe") is False:
        return 1
    return int(settings.get("experts") or settings.get("styles") or 1)


LENGTH = Experiment("gain against images seen", _length_cells, _length_tables, any_methods=True)
