"""Groups of runs that differ only in the seed, and comparisons of such groups."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from moetta.results.runs import Run, number

BASELINE = "noadapt"
"""The method that every run is compared with: the source model, not adapted."""
SHOWN_DIFFERENCES = 6


@dataclass(frozen=True)
class Stat:
    """A number over seeds."""

    values: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @cached_property
    def sd(self) -> float | None:
        """The unbiased standard deviation; None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def lowest(self) -> float:
        """The lowest value."""
        return min(self.values)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        runs: Sorted by seed.
        label: Its name in tables and figures, unique within a comparison.
        protocol: 0 for the comparison's main protocol, else the number of a deviating one.
    """

    runs: tuple[Run, ...]
    label: str
    protocol: int = 0

    @property
    def first(self) -> Run:
        """One of the runs, for what they have in common."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.first.method

    @property
    def variant(self) -> str | None:
        """The name of its overrides, if it has any."""
        return self.first.variant or None

    @property
    def short(self) -> str:
        """The label for narrow places: a variant without its method."""
        _, dot, tail = self.label.partition(" · ")
        return tail if dot else self.label

    def stat(self, *path: str, scale: float = 1.0, complete: bool = False) -> Stat | None:
        """A number from the summaries, found by its keys; None if no run has it.

        With `complete`, None unless every run has it.
        """
        values = [v * scale for run in self.runs if (v := number(run, *path)) is not None]
        if not values or (complete and len(values) < len(self.runs)):
            return None
        return Stat(tuple(values))

    @cached_property
    def accuracy(self) -> Stat:
        """Accuracy in %."""
        return Stat(tuple(run.accuracy for run in self.runs))

    @property
    def time(self) -> Stat | None:
        """Time as a multiple of the source model's."""
        return self.stat("cost", "time_ratio")

    @property
    def collapses(self) -> int:
        """How many runs ended below half of the source model's accuracy."""
        return sum(bool(run.summary.get("collapsed")) for run in self.runs)


@dataclass(frozen=True, eq=False)
class Comparison:
    """What one table compares: the groups of one model on one stream.

    Attributes:
        model: The model's name.
        stream: The stream's name.
        groups: Best first.
        deviations: How each protocol after the first differs from it.
    """

    model: str
    stream: str
    groups: tuple[Group, ...]
    deviations: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Stream and model, for sentences and headings."""
        return f"{self.stream} with {self.model}"

    @property
    def unadapted(self) -> Group | None:
        """The runs of the source model in the main protocol, if there are any."""
        found = (g for g in self.groups if g.method == BASELINE and g.protocol == 0)
        return next(found, None)

    @cached_property
    def baseline(self) -> Stat | None:
        """The source model's accuracy in %, from its runs or else as the other runs measured it.

        The other runs may have shown it only some of their batches.
        """
        if self.unadapted is not None:
            return self.unadapted.accuracy
        known = {
            run.seed: 100 * value
            for group in self.groups
            if group.protocol == 0
            for run in group.runs
            if (value := number(run, "noadapt_accuracy")) is not None
        }
        return Stat(tuple(known.values())) if known else None

    def gain(self, group: Group) -> Stat | None:
        """Points gained over the source model, on the same images where the runs measured both."""
        paired = group.stat("gain", scale=100, complete=True)
        if paired is not None:
            return paired
        if self.baseline is None or group.protocol:
            return None
        return Stat((group.accuracy.mean - self.baseline.mean,))

    def in_order(self, methods: Sequence[str] = ()) -> list[Group]:
        """The groups in a given order of methods; those not in it follow, best first."""
        place = {name: number for number, name in enumerate(methods)}
        known = [group for group in self.groups if group.method in place]
        known.sort(key=lambda g: (place[g.method], g.variant or "", g.protocol, g.label))
        first = [g for g in self.groups if g.method not in place and g.method == BASELINE]
        rest = [g for g in self.groups if g.method not in place and g.method != BASELINE]
        return first + known + rest


def make_group(runs: Iterable[Run], label: str | None = None, protocol: int = 0) -> Group:
    """Runs that differ only in the seed as a group."""
    members = tuple(sorted(runs, key=lambda run: run.seed))
    if not members:
        raise ValueError("a group needs at least one run")
    return Group(members, label or plain_label(members[0]), protocol)


def plain_label(run: Run) -> str:
    """The method's title, and its variant if it has one."""
    return f"{run.title} · {run.variant.replace('_', ' ')}" if run.variant else run.title


def aggregate(runs: Iterable[Run]) -> list[Group]:
    """Runs grouped by everything but the seed, in order of appearance."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(run.group_key, []).append(run)
    return [make_group(members) for members in found.values()]


def compare(runs: Iterable[Run], *, allow_mixed: bool = False) -> list[Comparison]:
    """One comparison per model and stream, sorted by name.

    Raises:
        ValueError: Runs of one model on one stream differ in protocol, and `allow_mixed` is off.
    """
    families: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        families[run.model, run.stream].append(run)
    made: list[Comparison] = []
    for (model, stream), members in sorted(families.items()):
        protocols = _by_protocol(members)
        deviations = tuple(differences(protocols[0][0], other[0]) for other in protocols[1:])
        if deviations and not allow_mixed:
            raise ValueError(
                f"the runs on {stream} with {model} differ in protocol and cannot share a table: "
                f"{protocols[0][0].folder.name} and {protocols[1][0].folder.name} differ in "
                f"{deviations[0]}; report them separately, or use --allow-mixed"
            )
        groups: list[Group] = []
        for place, same in enumerate(protocols):
            groups += _labelled(aggregate(same), place)
        groups.sort(key=lambda group: -group.accuracy.mean)
        made.append(Comparison(model, stream, tuple(groups), deviations))
    return made


def _by_protocol(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of equal protocol together, the most common protocol first."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.protocol].append(run)
    return sorted(found.values(), key=len, reverse=True)


def _labelled(groups: Sequence[Group], protocol: int) -> list[Group]:
    """Groups with unique labels: where labels are equal, the settings that differ are added."""
    families: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        families[group.label].append(group)
    made = []
    for label, family in families.items():
        apart = told_apart([group.first.settings for group in family])
        for group, settings in zip(family, apart, strict=True):
            full = f"{label} ({settings})" if settings else label
            if protocol:
                full += f" [protocol {protocol + 1}]"
            made.append(replace(group, label=full, protocol=protocol))
    return made


def differences(a: Run, b: Run) -> str:
    """The names and values in which two protocols differ."""
    mine, theirs = (dict(_flat(json.loads(run.protocol))) for run in (a, b))
    names = [n for n in sorted({*mine, *theirs}) if mine.get(n) != theirs.get(n)]
    return _listed([f"{n} ({_short(mine.get(n))} / {_short(theirs.get(n))})" for n in names])


def told_apart(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several settings, the names in which they differ, with its values.

    >>> told_apart([{"lr": 0.1, "k": {"n": 1}}, {"lr": 0.2, "k": {"n": 1}}])
    ['lr=0.1', 'lr=0.2']
    """
    if len(settings) < 2:
        return [""] * len(settings)
    flat = [dict(_flat(setting)) for setting in settings]
    names = dict.fromkeys(name for values in flat for name in values)
    differ = [n for n in names if any(values.get(n) != flat[0].get(n) for values in flat)]
    return [_listed([f"{n}={_short(values.get(n))}" for n in differ]) for values in flat]


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - SHOWN_DIFFERENCES
    return ", ".join(parts[:SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            inner = item.get("name", place) if isinstance(item, Mapping) else place
            yield from _flat(item, f"{name}[{inner}]")
    else:
        yield name, value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}…"


def spread(a: Stat, b: Stat) -> float | None:
    """The sd of the difference between a run of each; None unless both have several seeds."""
    if a.sd is None or b.sd is None:
        return None
    return math.hypot(a.sd, b.sd)


def slug(*parts: str) -> str:
    """A name for files and anchors."""
    text = "-".join(parts).replace("+", "-plus").lower()
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)
