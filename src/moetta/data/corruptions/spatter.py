"""Spatter."""

from torch import Tensor
from moetta.data.corruptions.core import Job


def spatter(images: Tensor, job: Job) -> Tensor:
    """Drops."""
    return images.clone()
