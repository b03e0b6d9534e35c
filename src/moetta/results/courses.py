"""Accuracy along a stream: what each group gains over the source model on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetta.results.groups import BASELINE, Comparison, Group
from moetta.results.runs import Run

if TYPE_CHECKING:
    import polars as pl

WINDOW = 1000  # images per point, roughly
POINTS = 40

Array = np.ndarray
Read = Callable[[Run], "pl.DataFrame | None"]
"""Reads the steps of a run; None if they cannot be used."""


def _read(run: Run) -> pl.DataFrame | None:
    return run.frame("steps")


@dataclass(frozen=True, eq=False)
class Along:
    """A run or the mean of several, in windows along the stream.

    Attributes:
        images: Images seen at the end of each window.
        accuracy: Accuracy in each window, in %.
        gain: Points above the source model in each window, on the batches both have seen.
        so_far: The same over all batches up to the end of each window.
    """

    images: Array
    accuracy: Array
    gain: Array
    so_far: Array


@dataclass(frozen=True, eq=False)
class Course:
    """Several seeds along the stream: mean and standard deviation."""

    mean: Along
    sd: Along | None


def courses(comparison: Comparison, read: Read = _read) -> dict[str, Course]:
    """The course of each group whose steps could be read, by label."""
    base = {} if comparison.unadapted is None else _answers(comparison.unadapted, read)
    made = {}
    for group in comparison.groups:
        if (found := _course(group, base, read)) is not None:
            made[group.label] = found
    return made


def course(group: Group, unadapted: Group | None, read: Read = _read) -> Course | None:
    """The course of one group, next to the runs of the source model on the same stream."""
    return _course(group, {} if unadapted is None else _answers(unadapted, read), read)


def _answers(unadapted: Group, read: Read) -> dict[tuple[str, int], Array]:
    """The source model's right answers by batch, for each protocol and seed."""
    found = {(run.protocol, run.seed): _steps(run, read) for run in unadapted.runs}
    return {key: steps[1] for key, steps in found.items() if steps is not None}


def _course(group: Group, base: dict[tuple[str, int], Array], read: Read) -> Course | None:
    runs = [_along(run, read, base) for run in group.runs]
    return _together([run for run in runs if run is not None])


def _steps(run: Run, read: Read) -> tuple[Array, Array, Array] | None:
    """Images, right answers and the source model's right answers (NaN if unknown), by batch."""
    frame = read(run)
    if frame is None:
        return None
    frame = frame.sort("step")
    columns = [frame["samples"], frame["correct"]]
    if run.method == BASELINE:
        columns.append(frame["correct"])
    elif "correct_noadapt" in frame.columns:
        columns.append(frame["correct_noadapt"])
    found = [column.cast(float).to_numpy().astype(float) for column in columns]
    if len(found) == 2:
        found.append(np.full(len(frame), np.nan))
    return found[0], found[1], found[2]


def _along(run: Run, read: Read, base: dict[tuple[str, int], Array]) -> Along | None:
    steps = _steps(run, read)
    if steps is None:
        return None
    samples, right, theirs = steps
    known = base.get((run.protocol, run.seed))
    if known is not None and len(known) == len(theirs):  # every batch, not only some of them
        theirs = np.where(np.isfinite(theirs), theirs, known)
    count = min(len(samples), int(np.clip(samples.sum() // WINDOW, 6, POINTS)))
    edges = np.linspace(0, len(samples), count + 1).astype(int)
    both = np.isfinite(theirs)
    ahead = np.add.reduceat(np.where(both, right - theirs, 0.0), edges[:-1])
    paired = np.add.reduceat(np.where(both, samples, 0.0), edges[:-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return Along(
            np.cumsum(samples)[edges[1:] - 1],
            100 * np.add.reduceat(right, edges[:-1]) / np.add.reduceat(samples, edges[:-1]),
            100 * ahead / paired,
            100 * np.cumsum(ahead) / np.cumsum(paired),
        )


def _together(runs: Sequence[Along]) -> Course | None:
    runs = [run for run in runs if len(run.images) == len(runs[-1].images)]
    if not runs:
        return None
    parts = {
        name: np.array([getattr(run, name) for run in runs])
        for name in ("images", "accuracy", "gain", "so_far")
    }
    mean = Along(**{name: values.mean(0) for name, values in parts.items()})
    if len(runs) == 1:
        return Course(mean, None)
    return Course(mean, Along(**{name: values.std(0, ddof=1) for name, values in parts.items()}))


def best_stop(along: Along) -> float:
    """After how many images to stop adapting, in hindsight; 0 if it never paid.

    There the adapted model is furthest ahead in right answers; what follows gives some back.
    """
    won = np.nan_to_num(along.so_far) * along.images
    best = int(won.argmax())
    return float(along.images[best]) if won[best] > 0 else 0.0


def quarters(along: Along) -> list[float]:
    """The gain in each quarter of the stream, in points."""
    sizes = np.diff(along.images, prepend=0.0)
    ahead = np.nan_to_num(along.gain) * sizes
    quarter = np.minimum(4 * (along.images - sizes / 2) / along.images[-1], 3).astype(int)
    return [
        float(ahead[quarter == q].sum() / max(sizes[quarter == q].sum(), 1.0)) for q in range(4)
    ]


def has_gain(group: Group, course: Course) -> bool:
    """Whether a gain over the source model can be shown for a group."""
    return group.method != BASELINE and bool(np.isfinite(course.mean.so_far).any())
