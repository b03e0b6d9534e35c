"""Tiny models of every family, with random weights: no download, milliseconds a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torchvision.models as tv
from timm.layers import GroupNorm
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig

CLASSES = 5
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A kind of model: how to build one, and what it eats."""

    name: str
    build: Callable[[], nn.Module]
    kind: str = "images"  # "images", "pixel_values" or "text"
    side: int = 16

    def model(self) -> nn.Module:
        """A fresh model in eval mode, the same weights every time."""
        return copy.deepcopy(_prototype(self.name))

    def shared(self) -> nn.Module:
        """One object for the whole run; no test may change it."""
        return _prototype(self.name)

    def batch(self, size: int = 4, seed: int = 0) -> Batch | tuple[Tensor]:
        """One batch, as the arguments of a call."""
        g = torch.Generator().manual_seed(1000 + seed)
        if self.kind == "text":
            ids = torch.randint(1, 50, (size, 8), generator=g)
            mask = (torch.arange(8) < torch.randint(3, 9, (size, 1), generator=g)).long()
            return {"input_ids": ids, "attention_mask": mask}
        images = torch.randn(size, 3, self.side, self.side, generator=g)
        return {"pixel_values": images} if self.kind == "pixel_values" else (images,)


def call(model: Any, batch: Batch | tuple[Tensor]) -> Tensor:
    """Call a model or an adapter and take out the logits."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, Tensor) else out.logits


def _hf(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(num_labels=CLASSES, **settings)
        return getattr(transformers, name)(made)

    return build


_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
_HF = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_STAGES = {"channels": (8, 8, 16, 16), "num_classes": CLASSES}


class Encoder(nn.Module):
    """PyTorch's own transformer, over the patches of an image or over words with padding."""

    def __init__(self, embed: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embed = embed
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        tokens = self.embed(x)
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.dim() == 4 else tokens
        return self.head(self.encoder(tokens, src_key_padding_mask=padding)[:, 0])


_ALL = [
    Family("timm_vit", lambda: VisionTransformer(**_VIT, num_classes=CLASSES)),
    Family("timm_deit", lambda: VisionTransformerDistilled(**_VIT, num_classes=CLASSES)),
    Family(
        "timm_swin",
        lambda: SwinTransformer(
            img_size=16,
            patch_size=2,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(1, 2),
            num_classes=CLASSES,
        ),
    ),
    Family(
        "timm_convnext",
        lambda: ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=CLASSES),
        side=32,
    ),
    Family("timm_resnet", lambda: ResNet(BasicBlock, (1, 1, 1, 1), **_STAGES), side=32),
    Family(
        "timm_resnet_gn",
        lambda: ResNet(
            BasicBlock, (1, 1, 1, 1), **_STAGES, norm_layer=partial(GroupNorm, num_groups=4)
        ),
        side=32,
    ),
    Family(
        "tv_vit",
        lambda: tv.VisionTransformer(
            image_size=16,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
            num_classes=CLASSES,
        ),
    ),
    Family(
        "tv_swin",
        lambda: tv.SwinTransformer(
            patch_size=[2, 2],
            embed_dim=8,
            depths=[2, 2],
            num_heads=[1, 2],
            window_size=[4, 4],
            num_classes=CLASSES,
        ),
    ),
    Family(
        "tv_convnext",
        lambda: tv.ConvNeXt(
            [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES
        ),
    ),
    Family("torch_encoder", lambda: Encoder(nn.Conv2d(3, 16, 8, 8))),
    Family(
        "hf_vit",
        _hf("ViTForImageClassification", "ViTConfig", **_HF, image_size=16, patch_size=8),
        "pixel_values",
    ),
    Family(
        "hf_dinov2",
        _hf(
            "Dinov2ForImageClassification",
            "Dinov2Config",
            **{**_HF, "mlp_ratio": 2},
            image_size=16,
            patch_size=8,
        ),
        "pixel_values",
    ),
    Family(
        "hf_convnext",
        _hf(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
        ),
        "pixel_values",
        side=32,
    ),
    Family(
        "hf_bert",
        _hf(
            "BertForSequenceClassification",
            "BertConfig",
            **_HF,
            vocab_size=50,
            max_position_embeddings=16,
        ),
        "text",
    ),
]
FAMILIES = {family.name: family for family in _ALL}
VIT = FAMILIES["timm_vit"]


@cache
def _prototype(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return enliven(FAMILIES[name].build()).eval()


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights such that every layer matters and entropies spread between 0 and ln C.

    Libraries start layer scales near zero and heads small: an error in a layer would not show.
    """
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=g)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                # Scales are one in every library, shifts zero; layer scales are neither.
                centre = 0.0 if (parameter == 0).all() else 1.0
                parameter.copy_(centre + 0.2 * noise)
        heads = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for head in heads:
            if head.out_features == CLASSES:
                head.weight.mul_(3)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.2, generator=g)
                module.running_var.uniform_(0.5, 1.5, generator=g)
    return model


def small_vit(depth: int = 2, classes: int = CLASSES, seed: int = 0) -> VisionTransformer:
    """A fresh tiny timm ViT for the tests of numbers."""
    settings = {**_VIT, "depth": depth, "num_classes": classes}
    return enliven(VisionTransformer(**settings), seed).eval()


def images(size: int = 8, seed: int = 0, side: int = 16) -> Tensor:
    """Random pictures, the same for the same seed."""
    return torch.randn(size, 3, side, side, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """The smallest residual block that every method can work with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Perceptron(nn.Module):
    """Two blocks over the patches of a 16 x 16 image: quick to compile, quick to step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def perceptron() -> nn.Module:
    """A fresh `Perceptron`, the same every time."""
    return enliven(Perceptron()).eval()
