"""What an adapter reports: one report per step, and their totals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass(frozen=True)
class StepReport:
    """One call of an adapter.

    Attributes:
        samples: images in the batch.
        forwards: samples forwarded through a network, all passes together.
        backwards: samples whose loss was differentiated.
        entropy: entropy of each sample's prediction [B].
        selected: which samples the method learnt from [B], or None if it does not choose.
        losses: the terms of the loss, by name.
        routing: expert of each sample [B, k], by layer name, if the method routes.
        skipped: why nothing was learnt, or None.
    """

    samples: int
    forwards: int
    backwards: int
    entropy: Tensor
    selected: Tensor | None = None
    losses: dict[str, float] = field(default_factory=dict)
    routing: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None


@dataclass(frozen=True)
class Totals:
    """Reports summed over a stream; its size does not grow with the stream.

    Attributes:
        steps: calls.
        samples: images.
        forwards: samples forwarded.
        backwards: samples differentiated.
        selected: samples learnt from.
        skipped: calls that learnt nothing.
        entropy: sum of all samples' finite entropies.
        losses: sum of each loss term over the steps where it is finite.
    """

    steps: int = 0
    samples: int = 0
    forwards: int = 0
    backwards: int = 0
    selected: int = 0
    skipped: int = 0
    entropy: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)

    def plus(self, step: StepReport) -> Totals:
        """These totals with one more step."""
        chosen = step.backwards if step.selected is None else int(step.selected.sum())
        losses = dict(self.losses)
        for name, value in step.losses.items():
            # One bad step must not make every later total NaN.
            losses[name] = losses.get(name, 0.0) + (value if math.isfinite(value) else 0.0)
        return replace(
            self,
            steps=self.steps + 1,
            samples=self.samples + step.samples,
            forwards=self.forwards + step.forwards,
            backwards=self.backwards + step.backwards,
            selected=self.selected + chosen,
            skipped=self.skipped + (step.skipped is not None),
            entropy=self.entropy + float(step.entropy.nan_to_num(0, 0, 0).sum()),
            losses=losses,
        )
