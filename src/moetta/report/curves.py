"""Accuracy along a stream: what each group gains over the source model on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetta.report.frames import Frames
from moetta.results import BASELINE, Comparison, Group, Run

WINDOW = 1000  # images per point, roughly
POINTS = 40

Array = np.ndarray


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


def courses(comparison: Comparison, frames: Frames) -> dict[str, Course]:
    """The course of each group whose steps could be read, by label."""
    base: dict[tuple[str, int], Array] = {}
    if comparison.unadapted is not None:
        for run in comparison.unadapted.runs:
            if (steps := _steps(run, frames)) is not None:
                base[run.protocol, run.seed] = steps[1]
    made = {}
    for group in comparison.groups:
        runs = [_along(run, frames, base) for run in group.runs]
        if (found := _together([run for run in runs if run is not None])) is not None:
            made[group.label] = found
    return made


def _steps(run: Run, frames: Frames) -> tuple[Array, Array, Array] | None:
    """Images, right answers and the source model's right answers (NaN if unknown), by batch."""
    frame = frames.read(run, "steps")
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


def _along(run: Run, frames: Frames, base: dict[tuple[str, int], Array]) -> Along | None:
    steps = _steps(run, frames)
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


def has_gain(group: Group, course: Course) -> bool:
    """Whether a gain over the source model can be shown for a group."""
    return group.method != BASELINE and bool(np.isfinite(course.mean.so_far).any())
