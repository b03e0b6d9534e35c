"""The guard on recorded plain runs: what it would have answered, without running a network.

Who answers has no influence on what the adapter learns, so up to the first alarm this is exactly
the guarded run. It takes seconds, and the sampled images can be drawn anew as often as wanted.

    python benchmarks/guard.py --record FOLDER --kinds plain --streams mixed lr-10
    python benchmarks/guard_replay.py FOLDER
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from torch import Tensor

from moetta.guard.answer import weighted_mean
from moetta.guard.config import GuardConfig
from moetta.guard.sampler import Sampler
from moetta.guard.trust import TRUSTED
from moetta.guard.watch import Watch


@dataclass(frozen=True)
class Options:
    """What is replayed."""

    folder: Annotated[Path, tyro.conf.Positional]
    draws: int = 2
    """How often the sampled images are drawn."""
    batch: int = 64


@dataclass(frozen=True)
class Replay:
    """Points of accuracy above the source model's up to the alarm, forward passes per image."""

    batches: int
    plain: float
    guarded: float
    forwards: float
    alarm: str


def read(file: Path) -> tuple[Tensor, Tensor]:
    """Logits and labels of a recorded run."""
    with np.load(file) as arrays:
        return torch.from_numpy(arrays["logits"]).float(), torch.from_numpy(arrays["labels"])


def replay(source: Tensor, adapted: Tensor, labels: Tensor, seed: int, batch: int) -> Replay:
    """Show the recorded answers to the guard's detectors."""
    options = GuardConfig(seed=seed)
    watch = Watch(options.sample, options.tolerance, options.interval)
    sampler = Sampler(options)
    right = torch.zeros(3)  # source, plain, guarded
    seen, forwards, alarm = 0, 0, ""
    for step, part in enumerate(torch.arange(len(labels)).split(batch)):
        index = part[sampler.choose(len(part), step, watch.trust < TRUSTED)]
        name = watch.add(source[index], adapted[index])
        forwards += len(part) + len(index)
        if name is not None:
            alarm = f"{name}, batch {step + 1}"
            break
        weight = watch.trust if watch.trust < TRUSTED else 1.0
        if weight < 1 and len(index) < len(part):
            forwards += len(part)
        answers = [source[part], adapted[part], adapted[part]]
        if weight < 1:
            answers[2] = weighted_mean(source[part], adapted[part], weight, watch.temperature)
        right += torch.tensor([float((a.argmax(1) == labels[part]).sum()) for a in answers])
        seen += len(part)
    zero, plain, guarded = (100 * right / max(seen, 1)).tolist()
    return Replay(seen // batch, plain - zero, guarded - zero, forwards / max(seen, 1), alarm)


def main(options: Options) -> None:
    """Replay every plain run whose source model's answers were recorded in the same order."""
    torch.set_num_threads(1)
    print("| stream | model | method | seed | batches | plain | guarded | forwards | alarm |")
    print("|---|---|---|---:|---:|---:|---:|---:|---|")
    for file in sorted(options.folder.glob("*_plain_*.npz")):
        stream, model, method, _, seed = file.stem.split("_")
        images = "mixed" if stream.startswith("lr-") else stream
        base = options.folder / f"{images}_{model}_noadapt_plain_{seed}.npz"
        # On small batches the guard shortens the steps, and the recorded run is not its run.
        if method == "noadapt" or stream.startswith("batch-") or not base.exists():
            continue
        source, labels = read(base)
        adapted, same = read(file)
        if not torch.equal(labels[: len(same)], same):
            continue
        for draw in range(options.draws):
            found = replay(source, adapted, same, draw, options.batch)
            print(
                f"| {stream} | {model} | {method} | {seed} | {found.batches} | {found.plain:+.2f} "
                f"| {found.guarded:+.2f} | {found.forwards:.2f} | {found.alarm} |",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
