"""What MGTTA hears of a vision transformer, from the definition."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def features(vit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Class tokens after each block, through the next norm; and the logits. From the definition."""
    x = vit._pos_embed(vit.patch_embed(x))
    phi = []
    for i, block in enumerate(vit.blocks):
        x = block(x)
        last = i + 1 == len(vit.blocks)
        phi.append((vit.norm if last else vit.blocks[i + 1].norm1)(x)[:, 0])
    return torch.cat(phi, 1), vit.head(phi[-1])
