"""Small models of every family, with random weights: no download, milliseconds per step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torchvision.models as tv
from timm.layers.norm import GroupNorm
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig

CLASSES = 5
Batch = dict[str, Tensor] | tuple[Tensor]


@dataclass(frozen=True)
class Family:
    """A kind of model to put methods to the test on.

    Attributes:
        name: what messages call it.
        build: makes a model with `CLASSES` classes; its weights are then randomised.
        kind: what it takes: images, images as ``pixel_values=``, or ``input_ids=`` with a mask.
        side: height and width of the images.
    """

    name: str
    build: Callable[[], nn.Module]
    kind: Literal["images", "pixel_values", "text"] = "images"
    side: int = 16

    def model(self) -> nn.Module:
        """A fresh model in eval mode, with the same weights every time."""
        return copy.deepcopy(_prototype(self))

    def shared(self) -> nn.Module:
        """One object for the whole run; nobody may change it."""
        return _prototype(self)

    def batch(self, size: int = 4, seed: int = 0) -> Batch:
        """One batch, as the arguments of a call."""
        g = torch.Generator().manual_seed(1000 + seed)
        if self.kind == "text":
            ids = torch.randint(1, 50, (size, 8), generator=g)
            mask = (torch.arange(8) < torch.randint(3, 9, (size, 1), generator=g)).long()
            return {"input_ids": ids, "attention_mask": mask}
        images = torch.randn(size, 3, self.side, self.side, generator=g)
        return {"pixel_values": images} if self.kind == "pixel_values" else (images,)


def call(model: Any, batch: Batch) -> Tensor:
    """Call a model or an adapter and take out the logits."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def _hf(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(num_labels=CLASSES, **settings)
        model: nn.Module = getattr(transformers, name)(made)
        return model

    return build


VIT_SIZES: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}
_HF: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
# timm types these two loosely or wrongly.
_distilled: Any = VisionTransformerDistilled
_BLOCK: Any = BasicBlock
_STAGES: dict[str, Any] = {"channels": (8, 8, 16, 16), "num_classes": CLASSES}


class Encoder(nn.Module):
    """PyTorch's own transformer, over the patches of an image or over padded words."""

    def __init__(self, embed: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embed = embed
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """The logits of the first token."""
        tokens = self.embed(x)
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.dim() == 4 else tokens
        logits: Tensor = self.head(self.encoder(tokens, src_key_padding_mask=padding)[:, 0])
        return logits


_ALL = [
    Family("timm_vit", lambda: VisionTransformer(**VIT_SIZES, num_classes=CLASSES)),
    Family("timm_deit", lambda: _distilled(**VIT_SIZES, num_classes=CLASSES)),
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
    Family("timm_resnet", lambda: ResNet(_BLOCK, (1, 1, 1, 1), **_STAGES), side=32),
    Family(
        "timm_resnet_gn",
        lambda: ResNet(
            _BLOCK, (1, 1, 1, 1), **_STAGES, norm_layer=partial(GroupNorm, num_groups=4)
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
]
_TRANSFORMERS = [
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
# transformers is an optional dependency.
FAMILIES = {f.name: f for f in (*_ALL, *(_TRANSFORMERS if find_spec("transformers") else ()))}
VIT = FAMILIES["timm_vit"]


@cache
def _prototype(family: Family) -> nn.Module:
    with torch.random.fork_rng(), torch.inference_mode(False):
        torch.manual_seed(0)
        return enliven(family.build()).eval()


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model weights with which every layer matters and entropies spread up to ln C.

    Libraries start layer scales near zero and heads small, which would hide an error in a layer.
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
        for head in heads(model):
            head.weight.mul_(3)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.2, generator=g)
                module.running_var.uniform_(0.5, 1.5, generator=g)
    return model


def heads(model: nn.Module) -> list[nn.Linear]:
    """The layers that put out logits."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [layer for layer in linear if layer.out_features == CLASSES]
