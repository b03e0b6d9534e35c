"""`moetta train-model`: trains one of the shipped models again, from its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moetta import zoo


@dataclass(frozen=True)
class TrainModel:
    """Train a small model from its recipe, as the shipped ones were trained."""

    name: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help=f"One of {', '.join(zoo.RECIPES)}.")
    ]
    out: Path = Path("models")
    """Folder for the weights, the card and, until training ends, the checkpoint."""
    data: Path | None = None
    """For models trained on CIFAR-10: the folder that holds it, as image files or as torchvision
    stores it."""
    steps: int | None = None
    """Fewer steps than the recipe's, to try it out; the card says so."""


def train_model(options: TrainModel) -> None:
    """Train, or resume an interrupted training."""
    recipe = zoo.recipe(options.name)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(recipe.name, total=options.steps or recipe.steps)

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"{recipe.name} loss {loss:.3f}")

        zoo.train_model(
            options.name, options.out, data=options.data, steps=options.steps, report=report
        )
