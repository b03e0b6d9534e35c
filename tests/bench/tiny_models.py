"""Models for the benchmark's tests: as small as they come, the same weights every time."""

from __future__ import annotations

import torch
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import nn


def vit() -> nn.Module:
    """A ViT for 32 x 32 pictures and 100 classes, sure of itself though it knows nothing."""
    torch.manual_seed(7)
    model = VisionTransformer(
        img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=100
    )
    with torch.no_grad():  # entropies spread out, or filters would choose all samples or none
        model.head.weight.normal_(0, 0.8)
    return model


def convnext() -> nn.Module:
    """A ConvNeXt of the same kind."""
    torch.manual_seed(8)
    return ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=100)


def photo_model() -> nn.Module:
    """A model whose config asks for another normalisation than the embedded benchmark's."""
    model = vit()
    model.pretrained_cfg = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
                            "input_size": (3, 32, 32)}  # fmt: skip
    return model


def no_model() -> str:
    return "not a model"


def ten_classes() -> nn.Module:
    """A ViT with fewer classes than the embedded benchmark has."""
    return VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=1, num_heads=2,
                             num_classes=10)  # fmt: skip
