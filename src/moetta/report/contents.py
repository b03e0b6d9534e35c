"""The report's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moetta.results import (
    BASELINE,
    Column,
    Comparison,
    Entry,
    Group,
    Published,
    Stat,
    Table,
    beside,
    entry,
    mean_only,
    number,
    slug,
    table,
)

METHOD = Column("Method")
ACCURACY = Column(
    "Accuracy", "%", best="high", explain="top-1, before each update; mean and sd over seeds"
)
PAPER = Column(
    "Paper", "%", explain="what the paper reports for the corresponding model and stream"
)
DIFFERENCE = Column("Difference", "points", explain="our mean minus the paper's")

NOTHING = Published()

OVERVIEW_NOTE = (
    "The paper's figures are for another model or other data (see each stream): compare the order "
    "of the methods and their gains, not the numbers."
)


def overview(
    model: str,
    comparisons: Sequence[Comparison],
    published: Mapping[tuple[str, str], Published] | None = None,
) -> Table:
    """One model on several streams: one row per method, our results next to the paper's."""
    printed = [(published or {}).get((c.model, c.stream), NOTHING) for c in comparisons]
    columns = [METHOD]
    for comparison in comparisons:
        columns += [
            Column(comparison.stream, "%", best="high"),
            Column(f"{comparison.stream}, paper", "%"),
            Column(f"{comparison.stream}, difference", "points"),
        ]
    columns.append(Column("Mean of streams", "%", best="high"))
    ordered = [c.in_order(p.order) for c, p in zip(comparisons, printed, strict=True)]
    labels = list(dict.fromkeys(group.label for groups in ordered for group in groups))
    found = [{group.label: group for group in groups} for groups in ordered]
    rows = []
    for label in labels:
        row = [Entry(label)]
        for groups, theirs in zip(found, printed, strict=True):
            row += _beside(groups.get(label), theirs)
        means = [groups[label].accuracy.mean for groups in found if label in groups]
        row.append(Entry(sum(means) / len(means) if len(means) == len(comparisons) else None))
        rows.append(row)
    notes = [OVERVIEW_NOTE] if any(theirs.caveat for theirs in printed) else []
    return table(f"overview-{slug(model)}", f"Accuracy with {model}", columns, rows, notes)


def _beside(group: Group | None, published: Published) -> list[Entry]:
    """Ours, the paper's and the difference."""
    return beside(group, published.accuracy.get((group.method, group.variant)) if group else None)


def accuracies(comparison: Comparison, published: Published = NOTHING) -> Table:
    """The main table of a comparison."""
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
    start = published.accuracy.get((BASELINE, None))
    rows = []
    for group in comparison.in_order(published.order):
        ours, theirs, difference = _beside(group, published)
        gained = their_gain = Entry(None)
        if group.method != BASELINE:
            gained = replace(entry(comparison.gain(group)), signed=True)
            if start is not None and isinstance(theirs.value, float):
                their_gain = Entry(theirs.value - start.mean, signed=True)
        rows.append(
            [
                Entry(group.label),
                ours,
                gained,
                theirs,
                difference,
                their_gain,
                Entry(group.accuracy.lowest if len(group.runs) > 1 else None),
                Entry(float(group.collapses)),
                Entry(float(len(group.runs))),
            ]
        )
    notes = [published.caveat] if published.caveat else []
    notes += [
        f"Protocol {number} differs in: {text} (first protocol / this one)."
        for number, text in enumerate(comparison.deviations, start=2)
    ]
    return table(
        f"accuracy-{slug(comparison.model, comparison.stream)}",
        f"Accuracy on {comparison.name}",
        columns,
        rows,
        notes,
    )


def beyond(comparison: Comparison, published: Published = NOTHING) -> Table:
    """What accuracy over the whole stream does not show."""
    columns = [
        METHOD,
        *(
            Column(f"Quarter {q}", "%", explain="accuracy in this quarter of the stream")
            for q in range(1, 5)
        ),
        Column("Top-5", "%", best="high"),
        Column("Calibration error", "%", best="low", explain="expected calibration error"),
        Column(
            "Forgetting",
            "points",
            explain="clean accuracy below that of no adaptation, in the last quarter",
        ),
        Column(
            "First gain",
            "step",
            0,
            explain="the first batch after which it stays ahead of no adaptation",
        ),
    ]
    rows = []
    for group in comparison.in_order(published.order):
        rows.append(
            [
                Entry(group.label),
                *(entry(_quarter(group, q)) for q in range(4)),
                entry(group.stat("top5", scale=100)),
                entry(group.stat("calibration_error", scale=100)),
                entry(group.stat("forgetting")),
                mean_only(group.stat("first_gain_step")),
            ]
        )
    return table(
        f"beyond-{slug(comparison.model, comparison.stream)}",
        f"Beyond accuracy on {comparison.name}",
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


def costs(comparison: Comparison, published: Published = NOTHING) -> Table:
    """What the methods cost, next to the paper's costs."""
    columns = [
        METHOD,
        Column("Time", "% of no adaptation", 0, explain="measured in the same run"),
        Column("Time, paper", "%", 0),
        Column("Forward", "% of images", 0, explain="images forwarded, over all passes"),
        Column("Forward, paper", "%", 0),
        Column("Backward", "% of images", 0, explain="images whose loss was differentiated"),
        Column("Backward, paper", "%", 0),
        Column("Activated parameters", "thousand", 1),
        Column("Activated, paper", "thousand", 0),
        Column("Peak memory", "MB", 0),
        Column("Duration", "s", 1),
    ]
    rows = []
    shown = False
    for group in comparison.in_order(published.order):
        theirs = {} if group.variant else published.costs.get(group.method, {})
        shown |= bool(theirs)
        rows.append(
            [
                Entry(group.label),
                entry(group.stat("cost", "time_ratio", scale=100)),
                Entry(theirs.get("time")),
                mean_only(_share(group, "forwards")),
                Entry(theirs.get("forward")),
                mean_only(_share(group, "backwards")),
                Entry(theirs.get("backward")),
                mean_only(group.stat("cost", "activated_parameters", scale=1e-3)),
                Entry(theirs.get("activated")),
                mean_only(group.stat("cost", "peak_memory_bytes", scale=1e-6)),
                mean_only(group.stat("cost", "seconds")),
            ]
        )
    return table(
        f"cost-{slug(comparison.model, comparison.stream)}",
        f"Cost on {comparison.name}",
        columns,
        rows,
        [published.cost_note] if shown and published.cost_note else [],
    )


def _share(group: Group, what: str) -> Stat | None:
    values = [
        100 * count / samples
        for run in group.runs
        if (count := number(run, "cost", what)) is not None and (samples := number(run, "samples"))
    ]
    return Stat(tuple(values)) if values else None


def domain_names(comparison: Comparison) -> list[str]:
    """The domains in the order of the stream's card, then any others."""
    names: dict[str, None] = {}
    for group in comparison.groups:
        for run in group.runs:
            listed = run.card["protocol"]["stream"].get("domains")
            for domain in listed if isinstance(listed, list) else []:
                names.setdefault(str(domain.get("name")))
            for name in run.summary.get("by_domain") or {}:
                names.setdefault(name)
    return [name for name in names if any(_domain(g, name) for g in comparison.groups)]


def _domain(group: Group, name: str) -> Stat | None:
    return group.stat("by_domain", name, "accuracy", scale=100)


def domain_accuracy(group: Group, name: str) -> float | None:
    """Mean accuracy in a domain, in %; None where no run has it."""
    stat = _domain(group, name)
    return None if stat is None else stat.mean


def domains(comparison: Comparison, published: Published = NOTHING) -> Table:
    """Accuracy by domain: one row per domain, one column per method, coloured."""
    groups = comparison.in_order(published.order)
    names = domain_names(comparison)
    columns = [Column("Domain"), *(Column(group.label, "%", 1) for group in groups)]
    rows = []
    for name in names:
        values = [domain_accuracy(group, name) for group in groups]
        known = [value for value in values if value is not None]
        best = max(known) if len(known) > 1 else None
        rows.append(
            [
                Entry(name),
                *(
                    Entry(
                        v,
                        heat=None if v is None else v / 100,
                        rank=int(v is not None and v == best),
                    )
                    for v in values
                ),
            ]
        )
    return table(
        f"domains-{slug(comparison.model, comparison.stream)}",
        f"Accuracy by domain on {comparison.name}; mean over seeds, best in bold",
        columns,
        rows,
    )
