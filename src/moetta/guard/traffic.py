"""What kind of traffic it is, as far as the source model can tell, and what follows from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Looks that it remembers, and from how many on it says anything. Traffic may change quickly.
MEMORY = 16
FEWEST = 8
# Traffic is narrow if the sure answers have less than half as many classes as the doubtful ones,
# and stays so until they have two thirds: it should not change with every look.
ENTER, LEAVE = math.log(2), math.log(1.5)
# Marks that differ by less are of one image; its logits may differ in their last digits.
SAME = 1e-4


class Traffic:
    """Whether the images are of few classes: of one only, or one class after another.

    A model spreads its errors over many classes where the images are of few, and drives them into
    few where the images are of many. Its sure answers are mostly right, so they tell which.

    Copies of one image count once: one image sent again and again does not make traffic of one
    class.

    Args:
        classes: number of classes.
        size: images in one look.

    Attributes:
        counts: decaying counts [2, C] of the source model's answers: its surer half in each look,
            and the other.
        images: how many of the images were of each class [C], by the source model and Bayes' rule.
        looks: looks so far.
        narrow: whether the images are of few classes.
    """

    def __init__(self, classes: int, size: int) -> None:
        self.size = size
        self.counts = torch.zeros(2, classes, dtype=torch.float64)
        self.images = torch.zeros(classes, dtype=torch.float64)
        self.looks = 0
        self.narrow = False
        self._pending = torch.zeros(0, classes, dtype=torch.float64)
        self._seen = torch.zeros(0, dtype=torch.float64)  # marks of the latest images

    def add(self, logits: Tensor) -> None:
        """Take the source model's logits of some images."""
        logits = logits.detach().cpu().double()
        seen = torch.cat((self._seen, marks(logits)))
        new = ~copies(seen, len(self._seen))
        self._seen = seen[-MEMORY * self.size :]
        self._pending = torch.cat((self._pending, logits[new]))
        while len(self._pending) >= self.size:
            self._look(self._pending[: self.size])
            self._pending = self._pending[self.size :].clone()

    def _look(self, logits: Tensor) -> None:
        sure, answers = logits.softmax(-1).max(-1)
        order = answers[sure.argsort(descending=True)]
        half = len(order) // 2
        # One step of the EM algorithm for class frequencies (Saerens, Latinne and Decaestecker).
        found = self.informed(logits).softmax(-1).sum(0)
        self.counts *= 1 - 1 / MEMORY
        for row, part in zip(self.counts, (order[:half], order[len(order) - half :]), strict=True):
            row += torch.bincount(part, minlength=len(row))
        self.images = (1 - 1 / MEMORY) * self.images + found
        self.looks += 1
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp_min(1)
        surer, other = (-torch.xlogy(shares, shares).sum(1)).tolist()
        margin = LEAVE if self.narrow else ENTER
        self.narrow = self.looks >= FEWEST and surer < other - margin

    def informed(self, logits: Tensor) -> Tensor:
        """Logits that know how frequent each class is; the source model takes all to be equal."""
        images = self.images + 0.5  # Krichevsky and Trofimov's estimate, never zero
        return logits + (images / images.sum()).log().to(logits)

    def state(self) -> dict[str, Tensor]:
        """All that it remembers, as tensors."""
        return {
            "counts": self.counts.clone(),
            "images": self.images.clone(),
            "looks": torch.tensor([self.looks, self.narrow]),
            "pending": self._pending.clone(),
            "seen": self._seen.clone(),
        }

    @classmethod
    def of_state(cls, state: dict[str, Tensor], size: int) -> Traffic:
        """The inverse of `state`."""
        counts, images, looks, pending, seen = (
            state[k].detach().cpu().clone()
            for k in ("counts", "images", "looks", "pending", "seen")
        )
        made = cls(len(images), size)
        made.counts, made.images, made._pending, made._seen = counts, images, pending, seen
        made.looks, made.narrow = int(looks[0]), bool(looks[1])
        return made


def marks(logits: Tensor) -> Tensor:
    """One number per image, by which copies are known."""
    # Not a product of matrices: its last digits depend on how many images there are.
    return (logits.double() * torch.arange(1, logits.shape[1] + 1).double().sin()).sum(1)


def copies(marks: Tensor, start: int = 0) -> Tensor:
    """Which images, from ``start`` on, stand earlier in the row already.

    >>> copies(torch.tensor([3.0, 5.0, 3.0, 3.0])).tolist()
    [False, False, True, True]
    """
    same = (marks[start:, None] - marks).abs() <= SAME * (1 + marks.abs())
    return same.tril(start - 1).any(1)
