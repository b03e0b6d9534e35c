"""Step 5,000 costs what step 50 costs: the state does not grow, and nothing is held on to."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.models import perceptron
from helpers.operations import Operations
from helpers.trials import LEARNS_NOTHING, METHODS, REFUSED, assert_finite, make

EARLY, STEPS = 52, 5000
# By default the others take fewer steps, so that the whole file needs less than a minute on one
# core; `make slow` runs them to the end.
LONG = ("noadapt", "moetta")
FEWER = 300
# These look at some samples twice, or do not learn from every batch.
IN_PARTS = {"sar", "deyo", "roid", "spa", "rotta"}
MIXED_SIZES = (2, 2, 2, 1)


def stream(steps: int) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(16, 3, 16, 16, generator=g)
    for step in range(steps):
        # The two steps that are compared see the same images.
        start = 0 if step + 1 in (EARLY, steps) else step % 13
        yield pool[start : start + MIXED_SIZES[step % 4]]


def live_tensors() -> tuple[int, int]:
    """How many tensors there are, and their bytes."""
    found = [o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter)]
    return len(found), sum(t.numel() * t.element_size() for t in found)


def resident() -> int:
    """Bytes of memory that the process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


def trials() -> Iterator[object]:
    for method in [m for m in METHODS if (m, "perceptron") not in REFUSED]:
        yield pytest.param(method, STEPS if method in LONG else FEWER, id=method)
        if method not in LONG:
            slow = [pytest.mark.slow, pytest.mark.timeout(1200)]
            yield pytest.param(method, STEPS, id=f"{method}-{STEPS}", marks=slow)


@pytest.mark.parametrize(("method", "steps"), [*trials()])
def test_neither_state_nor_memory_nor_work_grows(method: str, steps: int) -> None:
    slowly = {} if method in LEARNS_NOTHING else {"lr": 1e-5}
    adapter = make(method, model=perceptron(), **slowly)
    sizes: dict[int, dict[str, tuple]] = {}
    objects: dict[int, int] = {}
    tensors: dict[int, tuple[int, int]] = {}
    memory: dict[int, int] = {}
    operations: dict[int, int] = {}
    samples = 0
    for step, batch in enumerate(stream(steps), 1):
        if step in (EARLY, steps):
            with Operations() as counted:
                adapter(batch)
            operations[step] = counted.count
        else:
            adapter(batch)
        samples += len(batch)
        if step in (steps - 101, steps - 1):
            gc.collect()
            objects[step] = sys.getallocatedblocks()
        if step in (EARLY, steps):
            gc.collect()
            memory[step] = resident()
            tensors[step] = live_tensors()
            sizes[step] = {k: tuple(v.shape) for k, v in adapter.state_dict().items()}
    totals = adapter.totals
    assert (totals.steps, totals.samples, adapter.steps) == (steps, samples, steps)
    if method not in IN_PARTS:
        assert totals.forwards % samples == 0
        assert totals.skipped == 0
    assert (totals.backwards > 0) == (method not in LEARNS_NOTHING)
    assert sizes[EARLY] == sizes[steps]
    assert tensors[EARLY] == tensors[steps]
    assert operations[EARLY] == operations[steps] > 0
    # Python's and PyTorch's own caches fill and empty: up to a hundred objects more or less. A
    # report that is kept is four or more a step.
    assert objects[steps - 1] - objects[steps - 101] < 200, "Python objects pile up"
    # One kept batch a step would be 30 MB after 5,000.
    assert memory[steps] - memory[EARLY] < 8e6
    assert_finite(adapter.state_dict())
