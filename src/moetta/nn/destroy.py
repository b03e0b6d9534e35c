"""Destroying the shapes in an image while keeping its colours and textures (for DeYO)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moetta.nn.ranks import Share, draw


def shuffle_patches(
    images: Tensor, patches: int, generator: torch.Generator, share: Share | None = None
) -> Tensor:
    """Cut each image into a ``patches`` x ``patches`` grid and shuffle it, each differently.

    Sides that the grid does not divide are resized to the next lower multiple, then back. The
    images may be a ``share`` of a batch that is spread over several ranks.
    """
    batch, channels, height, width = images.shape
    rows, columns = height // patches, width // patches
    if rows == 0 or columns == 0:
        raise ValueError(f"an image of {height} x {width} cannot be cut into {patches} x {patches}")
    fits = (rows * patches, columns * patches) == (height, width)
    x = images if fits else _resize(images, rows * patches, columns * patches)
    x = x.reshape(batch, channels, patches, rows, patches, columns)
    x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, patches**2, channels, rows, columns)
    options = {"generator": generator, "device": images.device}
    draws = draw(torch.rand, (batch, patches**2), share, **options)
    order = draws.argsort(1)
    x = x[torch.arange(batch, device=images.device)[:, None], order]
    x = x.reshape(batch, patches, patches, channels, rows, columns).permute(0, 3, 1, 4, 2, 5)
    x = x.reshape(batch, channels, rows * patches, columns * patches)
    return x if fits else _resize(x, height, width)


def shuffle_pixels(images: Tensor, generator: torch.Generator) -> Tensor:
    """One permutation of the pixels, the same for the whole batch."""
    flat = images.flatten(2)
    order = torch.randperm(flat.shape[2], generator=generator, device=images.device)
    return flat[:, :, order].reshape(images.shape)


def occlude(images: Tensor, side: float) -> Tensor:
    """Cover the centre with a rectangle of the image's own mean colour."""
    height, width = images.shape[2:]
    h, w = round(height * side), round(width * side)
    top, left = (height - h) // 2, (width - w) // 2
    out = images.clone()
    out[:, :, top : top + h, left : left + w] = images.mean((2, 3), keepdim=True)
    return out


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(images, (height, width), mode="bilinear", align_corners=False)
