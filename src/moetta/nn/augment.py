"""CoTTA's random view of a batch of images: colours, pose, blur and noise, one draw for all."""

from __future__ import annotations

from typing import Literal

import torch
import torchvision.transforms.functional as TF
from torch import Tensor
from torchvision.transforms import InterpolationMode

from moetta.nn.ranks import Share, draw

_GREY = 1  # one channel has neither saturation nor hue


def augment(
    pixels: Tensor,
    generator: torch.Generator,
    *,
    blur: bool = True,
    noise: bool = True,
    padding: Literal["edge", "reflect"] = "edge",
    share: Share | None = None,
) -> Tensor:
    """One random view, with the same draw for every image of the batch.

    The padding is half of each side and the shift at most 1/16 of the padded side, which is 112
    and 28 pixels for images of 224.

    Args:
        pixels: [B, C, H, W] in [0, 1] (values outside are clipped), with one or three channels.
        generator: where the draws come from; on the device of the pixels.
        blur: blur a little.
        noise: add a little noise.
        padding: what lies beyond the edges.
        share: which part of a batch these are, if it is spread over several ranks.
    """
    if pixels.shape[1] not in (_GREY, 3):
        raise ValueError(f"can augment images of 1 or 3 channels, not {pixels.shape[1]}")
    x = _jitter(pixels.clamp(0, 1), generator)
    x = _move(x, generator, blur, padding)
    if noise:
        options = {"generator": generator, "device": x.device, "dtype": x.dtype}
        x = x + 0.005 * draw(torch.randn, x.shape, share, **options)
    return x.clamp(0, 1)


def _uniform(generator: torch.Generator, *ranges: tuple[float, float]) -> list[float]:
    draws = torch.rand(len(ranges), generator=generator, device=generator.device).tolist()
    return [low + (high - low) * u for (low, high), u in zip(ranges, draws, strict=True)]


def _jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Five changes of colour, in random order."""
    brightness, contrast, saturation, hue, gamma = _uniform(
        generator, (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)
    )
    changes = [
        lambda y: TF.adjust_brightness(y, brightness),
        lambda y: TF.adjust_contrast(y, contrast),
        lambda y: y if y.shape[1] == _GREY else TF.adjust_saturation(y, saturation),
        lambda y: y if y.shape[1] == _GREY else TF.adjust_hue(y, hue),
        lambda y: TF.adjust_gamma(y.clamp(1e-8, 1), gamma),
    ]
    for index in torch.randperm(5, generator=generator, device=generator.device).tolist():
        x = changes[index](x)
    return x


def _move(x: Tensor, generator: torch.Generator, blur: bool, padding: str) -> Tensor:
    """Turn, shift, zoom and perhaps blur within a margin; perhaps mirror."""
    height, width = x.shape[2:]
    pad_y, pad_x = height // 2, width // 2
    reach_y, reach_x = (height + 2 * pad_y) / 16, (width + 2 * pad_x) / 16
    angle, right, down, scale, sigma, mirror = _uniform(
        generator,
        (-15, 15),
        (-reach_x, reach_x),
        (-reach_y, reach_y),
        (0.9, 1.1),
        (0.001, 0.5),
        (0, 1),
    )
    x = TF.pad(x, [pad_x, pad_y], padding_mode=padding)
    x = TF.affine(
        x, angle, [round(right), round(down)], scale, [0.0, 0.0], InterpolationMode.BILINEAR
    )
    if blur:
        x = TF.gaussian_blur(x, [5, 5], [sigma, sigma])
    x = TF.center_crop(x, [height, width])
    return TF.hflip(x) if mirror < 0.5 else x
