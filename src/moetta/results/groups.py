"""From runs to what is compared: settings, and in each the methods with their seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetta.results.read import Failure
from moetta.results.runs import Run, aggregate, differences, newest, number, told_apart

NAMES = {
    "noadapt": "No adaptation",
    "tent": "Tent",
    "eata": "EATA",
    "cotta": "CoTTA",
    "sar": "SAR",
    "deyo": "DeYO",
    "mgtta": "MGTTA",
    "becotta": "BECoTTA",
    "moetta": "MoETTA",
}
ORDER = {name: place for place, name in enumerate(NAMES)}


@dataclass(frozen=True)
class Stat:
    """A figure over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """The unbiased standard deviation; None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one method with one configuration in one setting, one a seed.

    Attributes:
        label: What the report calls it; each group of a setting has its own.
        runs: Sorted by seed.
        protocol: 0 for the setting's main protocol, else the number of a deviating one.
    """

    label: str
    runs: tuple[Run, ...]
    protocol: int = 0

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def variant(self) -> str | None:
        """What was changed in the method, if anything."""
        return self.runs[0].variant or None

    @property
    def short(self) -> str:
        """The label where there is little room: a variant without its method."""
        _, dot, tail = self.label.partition(" · ")
        return tail if dot else self.label

    def stat(self, *path: str, scale: float = 1.0) -> Stat | None:
        """A figure of the summaries, found by its keys; None if no run has it."""
        values = [v * scale for run in self.runs if (v := number(run, *path)) is not None]
        return Stat(tuple(values)) if values else None

    @property
    def accuracy(self) -> Stat:
        """Accuracy in %."""
        return Stat(tuple(run.accuracy for run in self.runs))

    @property
    def time(self) -> Stat | None:
        """Time as a multiple of the unadapted model's."""
        return self.stat("cost", "time_ratio")

    @property
    def collapses(self) -> int:
        """How many runs ended below half of the unadapted accuracy."""
        return sum(bool(run.summary.get("collapsed")) for run in self.runs)


@dataclass(frozen=True, eq=False)
class Setting:
    """What one table may compare: one model on one stream.

    Attributes:
        model: The model's name.
        stream: The stream's name.
        groups: Best first.
        deviations: How each protocol beyond the first differs from it.
    """

    model: str
    stream: str
    groups: tuple[Group, ...]
    deviations: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Model and stream, for sentences and headings."""
        return f"{self.stream} with {self.model}"

    @property
    def baseline(self) -> Stat | None:
        """Accuracy of the unadapted model in %, from its own runs or else the others' records."""
        main = [group for group in self.groups if group.protocol == 0]
        for group in main:
            if group.method == "noadapt":
                return group.accuracy
        known = {
            run.seed: 100 * value
            for group in main
            for run in group.runs
            if (value := number(run, "noadapt_accuracy")) is not None
        }
        return Stat(tuple(known.values())) if known else None

    def in_order(self) -> list[Group]:
        """The groups in the paper's order of methods."""
        return sorted(
            self.groups,
            key=lambda g: (ORDER.get(g.method, len(ORDER)), g.variant or "", g.protocol, g.label),
        )


def settings(
    runs: Sequence[Run], *, allow_mixed: bool = False
) -> tuple[list[Setting], list[Failure]]:
    """Sort runs into settings; older repeats of the same cell are left out and named.

    Raises:
        ValueError: Runs of one model on one stream differ in protocol, and `allow_mixed` is off.
    """
    counted, again = newest(runs)
    repeats = [
        Failure(old.folder, f"not counted: the same cell is in {new.folder.name}, newer")
        for old, new in again
    ]
    cells: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in counted:
        cells[run.model, run.stream].append(run)
    made: list[Setting] = []
    for (model, stream), members in sorted(cells.items()):
        classes = _by_protocol(members)
        deviations = tuple(differences(classes[0][0], other[0]) for other in classes[1:])
        if deviations and not allow_mixed:
            raise ValueError(
                f"runs on {stream} with {model} differ in protocol and do not belong in one table: "
                f"{classes[0][0].folder.name} and {classes[1][0].folder.name} differ in "
                f"{deviations[0]}; report them apart, or allow it with --allow-mixed"
            )
        groups: list[Group] = []
        for place, same in enumerate(classes):
            groups += _labelled([found.runs for found in aggregate(same)], place)
        groups.sort(key=lambda group: -group.accuracy.mean)
        made.append(Setting(model, stream, tuple(groups), deviations))
    return made, repeats


def _by_protocol(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of equal protocol together, the most common protocol first."""
    classes: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        classes[run.protocol].append(run)
    return sorted(classes.values(), key=len, reverse=True)


def _labelled(groups: Sequence[tuple[Run, ...]], protocol: int) -> list[Group]:
    """Groups with a name each; equal names are told apart by the settings that differ."""
    families: dict[tuple[str, str | None], list[tuple[Run, ...]]] = defaultdict(list)
    for runs in groups:
        families[runs[0].method, runs[0].variant].append(runs)
    made = []
    for (method, variant), family in families.items():
        plain = NAMES.get(method, method)
        if variant:
            plain += f" · {variant.replace('_', ' ')}"
        apart = told_apart([runs[0].settings for runs in family])
        for runs, settings in zip(family, apart, strict=True):
            label = f"{plain} ({settings})" if settings else plain
            if protocol:
                label += f" [protocol {protocol + 1}]"
            made.append(Group(label, runs, protocol))
    return made


def spread(a: Stat, b: Stat) -> float | None:
    """The sd of the difference of two runs, one of each; None unless both have several seeds."""
    if a.sd is None or b.sd is None:
        return None
    return math.hypot(a.sd, b.sd)


def slug(*parts: str) -> str:
    """A name for files and anchors."""
    text = "-".join(parts).replace("+", "-plus").lower()
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)
