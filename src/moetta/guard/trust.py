"""How much the adapted model's word counts beside the source model's."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.guard.detectors import MEMORY

# Both models have an equal say. Below this, answers are overruled more like at random.
EQUAL = 0.5
# Above this, half-way from an equal say to full trust, the adapted model answers alone.
TRUSTED = 0.75


def confidence_in_doubt(sure: float, classes: int) -> float:
    """The source model's confidence in an answer that it may as well have given otherwise.

    Two equal candidates share the confidence that one has elsewhere; no answer has less than 1/C.

    Args:
        sure: mean confidence.
        classes: C.
    """
    return max(sure / 2, 1 / classes)


class Trust:
    """From 1, if only doubtful answers are overruled, to 0, if any are, as at random.

    Answers that are changed at random are answers in which the source model has its mean
    confidence. Answers that are changed because they are doubtful have that of a tie.

    Attributes:
        sums: decaying sums over the looks: confidence in changed answers, changed answers,
            confidence in all answers, all answers.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.sums = torch.zeros(4, dtype=torch.float64)

    def add(self, sure: Tensor, differ: Tensor) -> None:
        """Take one look: the source model's confidences, and which answers are overruled."""
        new = (sure[differ].sum(), differ.sum(), sure.sum(), len(sure))
        self.sums = (1 - 1 / MEMORY) * self.sums + torch.tensor([float(n) for n in new]).double()

    @property
    def value(self) -> float:
        """The trust."""
        changed, changes, total, count = (float(s) for s in self.sums)
        if count == 0:
            return 1.0
        mean = total / count
        doubt = confidence_in_doubt(mean, self.classes)
        if mean - doubt < 1e-6:  # the source model knows nothing
            return 1.0
        # One imagined change of a doubtful answer, so that a few real ones do not decide.
        found = (changed + doubt) / (changes + 1)
        return float(min(max((mean - found) / (mean - doubt), 0.0), 1.0))
