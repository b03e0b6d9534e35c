"""What is served: a network, how an image is prepared for it, and what its classes are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Classifier:
    """A source model and its borders.

    Attributes:
        name: what the model is called.
        model: the source model, in eval mode.
        prepare: turns an RGB image into a uint8 tensor [3, H, W] of the model's size.
        mean: mean by channel, for pixels in [0, 1].
        std: standard deviation by channel.
        labels: the classes' names.
    """

    name: str
    model: nn.Module
    prepare: Callable[[Image.Image], Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...]

    def batch(self, images: Sequence[Tensor]) -> Tensor:
        """Prepared images as the model takes them: float, normalised, on the model's device."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        stacked = torch.stack(list(images)).to(device)
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.mean, device=device).view(shape) * 255
        std = torch.tensor(self.std, device=device).view(shape) * 255
        return stacked.float().sub_(mean).div_(std)

    def source(self, images: Tensor) -> Tensor:
        """The source model's logits."""
        with torch.inference_mode():
            output = self.model(images)
        logits: Tensor = getattr(output, "logits", output)
        return logits
