"""The report's tables, made from settings."""

from __future__ import annotations

from collections.abc import Sequence

from moetta.paper import beside as paper
from moetta.results.groups import Group, Setting, Stat, slug
from moetta.results.runs import number
from moetta.results.tables import Cell, Column, Table, cell, mean_only, table

METHOD = Column("Method")
ACCURACY = Column("Accuracy", "%", best="high", explain="top-1, before each update; mean and sd")
PAPER = Column("Paper", "%", explain="the accuracy the paper prints for the counterpart")
DIFFERENCE = Column("Difference", "points", explain="our mean minus the paper's")

OVERVIEW_NOTE = (
    "The paper's figures were measured with another model or other data (see each stream): compare "
    "the order of the methods and their gains, not the numbers."
)


def gain(setting: Setting, group: Group) -> Stat | None:
    """Points gained over the unadapted model: on the same images where the runs know it."""
    paired = group.stat("gain", scale=100)
    if paired is not None and len(paired.values) == len(group.runs):
        return paired
    if setting.baseline is None or group.protocol:
        return None
    return Stat((group.accuracy.mean - setting.baseline.mean,))


def overview(model: str, settings: Sequence[Setting]) -> Table:
    """One model on several streams: a row a method, and for each stream ours beside the paper's."""
    columns = [METHOD]
    for setting in settings:
        columns += [
            Column(setting.stream, "%", best="high"),
            Column(f"{setting.stream}, paper", "%"),
            Column(f"{setting.stream}, difference", "points"),
        ]
    columns.append(Column("Mean of streams", "%", best="high"))
    labels = list(dict.fromkeys(g.label for s in settings for g in s.in_order()))
    found = [{group.label: group for group in setting.groups} for setting in settings]
    rows = []
    for label in labels:
        row = [Cell(label)]
        for setting, groups in zip(settings, found, strict=True):
            group = groups.get(label)
            row += [Cell(None)] * 3 if group is None else _beside_paper(setting, group)
        means = [groups[label].accuracy.mean for groups in found if label in groups]
        row.append(Cell(sum(means) / len(means) if len(means) == len(settings) else None))
        rows.append(row)
    notes = [OVERVIEW_NOTE] if any(map(paper.caveat, settings)) else []
    return table(f"overview-{slug(model)}", f"Accuracy with {model}", columns, rows, notes)


def _beside_paper(setting: Setting, group: Group) -> list[Cell]:
    printed = paper.accuracy(setting, group)
    if printed is None:
        return [cell(group.accuracy), Cell(None), Cell(None)]
    difference = Cell(group.accuracy.mean - printed.mean, signed=True)
    return [cell(group.accuracy), Cell(printed.mean, printed.sd), difference]


def accuracies(setting: Setting) -> Table:
    """The main table of a setting."""
    columns = [
        METHOD,
        ACCURACY,
        Column("Gain", "points", best="high", explain="over no adaptation, on the same images"),
        PAPER,
        DIFFERENCE,
        Column("Paper's gain", "points", explain="the paper's accuracy minus its no adaptation"),
        Column("Worst seed", "%"),
        Column("Collapsed", "runs", 0, explain="ended below half of no adaptation"),
        Column("Seeds", "", 0),
    ]
    unadapted = next((g for g in setting.groups if g.method == "noadapt"), None)
    start = paper.accuracy(setting, unadapted) if unadapted else None
    rows = []
    for group in setting.in_order():
        printed = paper.accuracy(setting, group)
        adapted = group.method != "noadapt"
        gained = cell(gain(setting, group)) if adapted else Cell(None)
        theirs = printed.mean - start.mean if printed and start and adapted else None
        rows.append(
            [
                Cell(group.label),
                *_beside_paper(setting, group)[:1],
                Cell(gained.value, gained.sd, signed=True),
                *_beside_paper(setting, group)[1:],
                Cell(theirs, signed=True),
                Cell(min(group.accuracy.values)) if len(group.runs) > 1 else Cell(None),
                Cell(float(group.collapses)),
                Cell(float(len(group.runs))),
            ]
        )
    notes = [note for note in (paper.caveat(setting),) if note]
    notes += [
        f"Protocol {number} differs in: {text} (first protocol / this one)."
        for number, text in enumerate(setting.deviations, start=2)
    ]
    return table(
        f"accuracy-{slug(setting.model, setting.stream)}",
        f"Accuracy on {setting.name}",
        columns,
        rows,
        notes,
    )


def beyond(setting: Setting) -> Table:
    """What top-1 over the whole stream does not tell."""
    columns = [
        METHOD,
        *(Column(f"Quarter {q}", "%", explain="accuracy in it") for q in range(1, 5)),
        Column("Top-5", "%", best="high"),
        Column("Calibration error", "%", best="low", explain="expected calibration error"),
        Column(
            "Forgetting",
            "points",
            explain="clean accuracy lost against no adaptation, in the last quarter",
        ),
        Column(
            "First gain",
            "step",
            0,
            explain="the batch from which on it stays ahead of no adaptation",
        ),
    ]
    rows = []
    for group in setting.in_order():
        rows.append(
            [
                Cell(group.label),
                *(cell(_quarter(group, q)) for q in range(4)),
                cell(group.stat("top5", scale=100)),
                cell(group.stat("calibration_error", scale=100)),
                cell(group.stat("forgetting")),
                mean_only(group.stat("first_gain_step")),
            ]
        )
    return table(
        f"beyond-{slug(setting.model, setting.stream)}",
        f"Beyond accuracy on {setting.name}",
        columns,
        rows,
    )


def _quarter(group: Group, place: int) -> Stat | None:
    values = [
        100 * float(quarters[place])
        for run in group.runs
        if isinstance(quarters := run.summary.get("by_quarter"), list)
        and len(quarters) > place
        and isinstance(quarters[place], int | float)
    ]
    return Stat(tuple(values)) if values else None


def costs(setting: Setting) -> Table:
    """What the accuracy costs, beside the paper's figures."""
    columns = [
        METHOD,
        Column("Time", "% of no adaptation", 0, explain="measured in the same run"),
        Column("Time, paper", "%", 0),
        Column("Forward", "% of images", 0, explain="images forwarded, all passes together"),
        Column("Forward, paper", "%", 0),
        Column("Backward", "% of images", 0, explain="images whose loss was differentiated"),
        Column("Backward, paper", "%", 0),
        Column("Activated parameters", "thousand", 1),
        Column("Activated, paper", "thousand", 0),
        Column("Peak memory", "MB", 0),
        Column("Duration", "s", 1),
    ]
    rows = []
    for group in setting.in_order():
        activated = paper.cost(group, "activated")
        rows.append(
            [
                Cell(group.label),
                cell(group.stat("cost", "time_ratio", scale=100)),
                Cell(paper.cost(group, "time")),
                mean_only(_share(group, "forwards")),
                Cell(paper.cost(group, "forward")),
                mean_only(_share(group, "backwards")),
                Cell(paper.cost(group, "backward")),
                mean_only(group.stat("cost", "activated_parameters", scale=1e-3)),
                Cell(None if activated is None else activated * 1000),
                mean_only(group.stat("cost", "peak_memory_bytes", scale=1e-6)),
                mean_only(group.stat("cost", "seconds")),
            ]
        )
    note = "The paper's costs: ViT-B/16 on potpourri+ of ImageNet, on its own machine."
    shown = any(row[2].value is not None for row in rows)
    return table(
        f"cost-{slug(setting.model, setting.stream)}",
        f"Cost on {setting.name}",
        columns,
        rows,
        [note] if shown else [],
    )


def _share(group: Group, what: str) -> Stat | None:
    values = [
        100 * count / samples
        for run in group.runs
        if (count := number(run, "cost", what)) is not None and (samples := number(run, "samples"))
    ]
    return Stat(tuple(values)) if values else None


def domain_names(setting: Setting) -> list[str]:
    """The domains in the order of the stream's card, then any others."""
    names: dict[str, None] = {}
    for group in setting.groups:
        for run in group.runs:
            listed = run.card["protocol"]["stream"].get("domains")
            for domain in listed if isinstance(listed, list) else []:
                names.setdefault(str(domain.get("name")))
            for name in run.summary.get("by_domain") or {}:
                names.setdefault(name)
    return [name for name in names if any(_domain(g, name) for g in setting.groups)]


def _domain(group: Group, name: str) -> Stat | None:
    return group.stat("by_domain", name, "accuracy", scale=100)


def domain_accuracy(group: Group, name: str) -> float | None:
    """Mean accuracy in a domain, in %; None where no run has it."""
    stat = _domain(group, name)
    return None if stat is None else stat.mean


def domains(setting: Setting) -> Table:
    """Accuracy by domain, a row a domain and a column a method, as a heat map."""
    groups = setting.in_order()
    names = domain_names(setting)
    columns = [Column("Domain"), *(Column(group.label, "%", 1) for group in groups)]
    rows = []
    for name in names:
        values = [domain_accuracy(group, name) for group in groups]
        known = [value for value in values if value is not None]
        best = max(known) if len(known) > 1 else None
        rows.append(
            [
                Cell(name),
                *(
                    Cell(
                        v,
                        heat=None if v is None else v / 100,
                        rank=int(v is not None and v == best),
                    )
                    for v in values
                ),
            ]
        )
    return table(
        f"domains-{slug(setting.model, setting.stream)}",
        f"Accuracy by domain on {setting.name}; mean over seeds, best of a domain bold",
        columns,
        rows,
    )
