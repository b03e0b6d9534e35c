"""How much the source model's answers tell about the images."""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.guard.detectors import MEMORY

# Nearer to nothing than to what is usual.
LITTLE = 0.5
# Looks after which it is known what is usual.
FEWEST = 8
# The weight in what is usual of a look that tells little: such traffic becomes usual if it stays,
# but not while it comes and goes.
SLOW = 0.25


class Information:
    """Finds images that the source model cannot tell apart: noise, blank frames, a covered lens.

    The answers to n images tell I = H(mean of the predictions) - mean of their entropies about
    which image it was: nothing if all images get the same prediction. There is nothing to learn
    from such images, whatever their entropy, and entropy minimisation drives all of them into one
    class.

    Attributes:
        sums: decaying sums over the looks: information, and looks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums = torch.zeros(2, dtype=torch.float64)

    def add(self, logits: Tensor) -> bool:
        """Take the source model's logits of some images; whether they tell little."""
        if len(logits) < self.size:
            return False
        looks = logits[: len(logits) // self.size * self.size].unflatten(0, (-1, self.size))
        found = float(information(looks).mean())
        total, seen = self.sums.tolist()
        little = seen >= FEWEST and found < LITTLE * total / seen
        weight = SLOW if little else 1.0
        new = torch.tensor([found, 1.0], dtype=torch.float64)
        self.sums = (1 - weight / MEMORY) * self.sums + weight * new
        return bool(little)


def information(logits: Tensor) -> Tensor:
    """The mutual information between images and their predictions, in nats.

    >>> apart, alike = [[9.0, 0.0], [0.0, 9.0]], [[3.0, 2.0], [3.0, 2.0]]
    >>> [round(found, 4) for found in information(torch.tensor([apart, alike])).tolist()]
    [0.6919, 0.0]

    Args:
        logits: of several groups of images [G, n, C].
    """
    p = logits.detach().cpu().double().softmax(-1)
    mean = p.mean(-2)
    known = torch.xlogy(p, p).sum(-1).mean(-1) - torch.xlogy(mean, mean).sum(-1)
    return known.clamp(min=0)
