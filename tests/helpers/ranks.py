"""Runs functions on several gloo ranks: processes are started once for many functions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)
Case = tuple[str, Callable[..., None], tuple[Any, ...]]


def run_on_ranks(size: int, cases: Sequence[Case], folder: Path) -> dict[str, str]:
    """Run each case on all ranks; returns what went wrong, by case ("" if nothing).

    A case is a name, a function ``f(group, *args)`` of a module, and its arguments.
    """
    mp.spawn(_work, (size, list(cases), folder), size)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return {name: "\n".join(filter(None, (f[name] for f in found))) for name, _, _ in cases}


def _work(rank: int, size: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    outcomes = {}
    for name, function, args in cases:
        # A group for each case: one that fails on one rank does not upset the next.
        group = dist.new_group(timeout=TIMEOUT)
        try:
            function(group, *args)
            outcomes[name] = ""
        except Exception as error:
            outcomes[name] = f"rank {rank}: {type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
