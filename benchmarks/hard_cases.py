"""Chooses the embedded benchmark's hard cases as ImageNet-A's were: images that a model gets wrong.

Trains a small network, with another shape and another seed than the shipped models, and shows it
clean compositions of test digits. The numbers of those that it gets wrong go to
``src/moetta/data/embedded/hard.json``, enough of them for streams of 100 times the usual length.

    python benchmarks/hard_cases.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from moetta.data.embedded.compose import photographs
from moetta.data.embedded.compositions import COUNTS, HARD_SEED
from moetta.files import write_atomically
from moetta.zoo.networks import ConvNeXtShape
from moetta.zoo.recipes import RECIPES
from moetta.zoo.shipped_models import assemble
from moetta.zoo.train_and_measure import training_batches
from moetta.zoo.trainer import Trainer, normalise

TARGET = Path(__file__).parents[1] / "src" / "moetta" / "data" / "embedded" / "hard.json"
JUDGE = replace(
    RECIPES["digits-convnext"],
    name="digits-judge",
    shape=ConvNeXtShape(dims=(24, 48, 96, 128), depths=(1, 1, 1, 1), kernel=5),
    steps=800,
    ema=0.99,
    seed=77,
)
WANTED = 100 * COUNTS["a"]


def main() -> None:
    """Trains the judge and writes the images that it gets wrong."""
    torch.set_num_threads(1)
    trainer = Trainer(JUDGE)
    trainer.fit(training_batches(JUDGE, None), None, _report)
    judge = assemble(trainer.recipe, trainer.average)
    wrong: list[int] = []
    candidates = 0
    while len(wrong) < WANTED:
        index = torch.arange(candidates, candidates + 200)
        images, labels = photographs(index, split="test", seed=HARD_SEED)
        with torch.inference_mode():
            guess = judge(normalise(images, JUDGE)).argmax(1)
        wrong += index[guess != labels].tolist()
        candidates += len(index)
    accuracy = 100 * (1 - len(wrong) / candidates)
    print(f"the judge gets {accuracy:.1f} % of {candidates:,} right; {len(wrong):,} hard cases")
    found = {
        "judge": JUDGE.as_dict(),
        "judge_accuracy": round(accuracy, 2),
        "candidates": candidates,
        "index": wrong[:WANTED],
    }
    write_atomically(TARGET, (json.dumps(found) + "\n").encode())


def _report(step: int, loss: float) -> None:
    if step % 100 == 0:
        print(f"step {step} of {JUDGE.steps}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
