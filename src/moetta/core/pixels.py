"""Pixels as they were before normalisation, for methods that look at changed images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from moetta.core.config import Config, require

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter
    from moetta.core.inputs import Inputs


@dataclass(frozen=True)
class PixelConfig(Config):
    """How the images were normalised.

    Attributes:
        mean: the mean that was subtracted from the pixels, by channel, so that a change of the
            image can undo it; None reads it from a timm model's configuration.
        std: the standard deviation that the pixels were divided by; None as for the mean.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        require((self.mean is None) == (self.std is None), "give both mean and std, or neither")
        require(not self.std or min(self.std) > 0, f"std must be above 0, got {self.std}")

    def with_pixels(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """The changes undo the normalisation."""
        return self if self.mean is not None else replace(self, mean=mean, std=std)


class Pixels:
    """Changes the pixels of a batch, before their normalisation."""

    def __init__(self, adapter: Adapter[Any], config: PixelConfig, otherwise: str) -> None:
        self.method, self.otherwise = adapter.method, otherwise
        network, said = adapter.network, "mean= and std= give"
        mean: Any = config.mean
        std: Any = config.std
        if mean is None:
            own = getattr(network, "pretrained_cfg", None)
            own = own or getattr(network, "default_cfg", None) or {}
            mean, std, said = own.get("mean"), own.get("std"), "the model's configuration gives"
        self.mean, self.std, self.said = mean, std, said

    @property
    def known(self) -> bool:
        """Whether the normalisation is known."""
        return self.mean is not None and self.std is not None

    def unknown(self) -> str:
        """What to do where it is not."""
        return (
            f"{self.method} changes un-normalised pixels, but this model does not say how its "
            "inputs are normalised: pass mean= and std= (one number per channel), or "
            f"{self.otherwise}"
        )

    def require_known(self) -> None:
        """Refuse a model whose normalisation is unknown."""
        require(self.known, self.unknown())

    def scale(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, in a form to compute with.

        Raises:
            ValueError: they are unknown, or do not fit the channels.
        """
        self.require_known()
        channels = images.shape[1]
        if {len(self.mean), len(self.std)} - {1, channels}:
            raise ValueError(
                f"the images have {channels} channels, but {self.said} {len(self.mean)} means and "
                f"{len(self.std)} deviations; pass mean= and std= with one number per channel"
            )
        shape = (1, -1, 1, 1)
        return images.new_tensor(self.mean).view(shape), images.new_tensor(self.std).view(shape)

    def changed(self, inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The batch with ``change`` applied to its pixels in 0..1.

        Raises:
            ValueError: the batch has no images, or their normalisation is unknown.
        """
        images = inputs.images
        if images is None:
            raise ValueError(
                f"{self.method} changes images and needs an image batch [B, C, H, W]; for other "
                f"inputs {self.otherwise}"
            )
        mean, std = self.scale(images)
        return inputs.with_images((change(images * std + mean) - mean) / std)
