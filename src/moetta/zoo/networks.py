"""The networks of the shipped models: small timm models for images of 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from timm.layers.norm import LayerNorm2d
from timm.models.convnext import ConvNeXt
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


def _stem_layers(in_chans: int, widths: Sequence[int], convs: int) -> list[tuple[int, int, int]]:
    """Channels in, channels out and stride of each convolution; the first per size halves it."""
    channels = [in_chans, *(width for width in widths for _ in range(convs))]
    return [(a, b, 1 if i % convs else 2) for i, (a, b) in enumerate(pairwise(channels))]


class ConvStem(nn.Module):
    """3 x 3 convolutions that halve the image step by step, in place of timm's patch embedding.

    Small vision transformers learn far faster from few images when the first layers are
    convolutions. At each size the first convolution has stride 2, and ``convs - 1`` more follow.
    With ``normed``, a LayerNorm over the channels follows each convolution: a norm layer close to
    the pixels can undo more of a photometric shift.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        widths: tuple[int, ...] = (),
        convs: int = 1,
        normed: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        stages = patch_size.bit_length() - 1
        if 2**stages != patch_size or stages < 1:
            raise ValueError(
                f"patch must be 2, 4, 8, ... for a convolutional stem, got {patch_size}"
            )
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.patch_size = (patch_size, patch_size)
        widths = widths or (embed_dim // 2, *[embed_dim] * (stages - 1))
        if len(widths) != stages or widths[-1] != embed_dim:
            raise ValueError(
                f"stem_widths must be {stages} numbers for patches of {patch_size}, the last of "
                f"them {embed_dim}, got {widths}"
            )
        layers = _stem_layers(in_chans, widths, convs)
        self.proj = nn.ModuleList(
            nn.Conv2d(width, out, 3, stride=stride, padding=1) for width, out, stride in layers
        )
        norm = nn.LayerNorm if normed else nn.Identity
        self.norms = nn.ModuleList(norm(out) for _, out, _ in layers)

    def feat_ratio(self) -> tuple[int, int]:
        """How many pixels a token covers; called by timm."""
        return self.patch_size

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, T, D]."""
        for stage, (convolution, norm) in enumerate(zip(self.proj, self.norms, strict=True)):
            if stage:
                x = nn.functional.gelu(x).permute(0, 3, 1, 2)
            x = norm(convolution(x).permute(0, 2, 3, 1))
        return x.flatten(1, 2)


@dataclass(frozen=True)
class ViTShape:
    """A small timm ``VisionTransformer``."""

    dim: int = 96
    depth: int = 6
    heads: int = 3
    patch: int = 4
    conv_stem: bool = True
    stem_widths: tuple[int, ...] = ()
    """Channels at each size of the stem; by default half of ``dim``, then ``dim``."""
    stem_convs: int = 1
    """Convolutions at each size of the stem."""
    stem_norm: bool = False
    """A LayerNorm after each convolution of the stem."""
    drop_path: float = 0.0
    image: int = 32

    def build(self, classes: int) -> nn.Module:
        """The untrained network; its initial weights come from torch's global generator."""
        stem = partial(
            ConvStem, widths=self.stem_widths, convs=self.stem_convs, normed=self.stem_norm
        )
        extra: dict[str, Any] = {"embed_layer": stem} if self.conv_stem else {}
        return VisionTransformer(
            img_size=self.image,
            patch_size=self.patch,
            embed_dim=self.dim,
            depth=self.depth,
            num_heads=self.heads,
            num_classes=classes,
            drop_path_rate=self.drop_path,
            **extra,
        )


@dataclass(frozen=True)
class ConvNeXtShape:
    """A small timm ``ConvNeXt`` (channels-last blocks) with a stem for 32-pixel images.

    The stem is a 3 x 3 convolution of stride 2, or non-overlapping patches of 4 pixels, or, given
    ``stem_widths``, 3 x 3 convolutions that halve the image step by step.
    """

    dims: tuple[int, int, int, int] = (40, 80, 160, 256)
    depths: tuple[int, int, int, int] = (1, 2, 2, 1)
    kernel: int = 7
    stem_stride: int = 2
    stem_widths: tuple[int, ...] = ()
    """Channels at each size of a stem with several convolutions; the last is ``dims[0]``."""
    stem_convs: int = 1
    """Convolutions at each size of such a stem."""
    layer_scale: float = 0.1
    drop_path: float = 0.0
    image: int = 32

    def build(self, classes: int) -> nn.Module:
        """The untrained network; its initial weights come from torch's global generator."""
        model = ConvNeXt(
            num_classes=classes,
            dims=self.dims,
            depths=self.depths,
            kernel_sizes=self.kernel,
            ls_init_value=self.layer_scale,
            drop_path_rate=self.drop_path,
            conv_mlp=False,
        )
        model.stem = self._convolutions() if self.stem_widths else self._patches()
        return model

    def _patches(self) -> nn.Sequential:
        kernel = max(3, self.stem_stride)
        padding = (kernel - self.stem_stride + 1) // 2
        return nn.Sequential(
            nn.Conv2d(3, self.dims[0], kernel, stride=self.stem_stride, padding=padding),
            LayerNorm2d(self.dims[0]),
        )

    def _convolutions(self) -> nn.Sequential:
        if self.stem_widths[-1] != self.dims[0]:
            raise ValueError(
                f"stem_widths must end with dims[0] = {self.dims[0]}, got {self.stem_widths}"
            )
        layers: list[nn.Module] = []
        for width, out, stride in _stem_layers(3, self.stem_widths, self.stem_convs):
            layers += [nn.GELU()] if layers else []
            layers += [nn.Conv2d(width, out, 3, stride=stride, padding=1), LayerNorm2d(out)]
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class ResNetShape:
    """A small timm ``ResNet`` with BatchNorm.

    Its stem, three 3 x 3 convolutions, halves the image once: a ResNet's usual stem would leave
    8 x 8 positions of an image of 32 pixels to the first stage.
    """

    dims: tuple[int, int, int, int] = (32, 64, 96, 128)
    depths: tuple[int, int, int, int] = (1, 1, 1, 1)
    image: int = 32

    def build(self, classes: int) -> nn.Module:
        """The untrained network; its initial weights come from torch's global generator."""
        model = ResNet(
            BasicBlock,  # type: ignore[arg-type]  # timm means the class
            self.depths,
            num_classes=classes,
            channels=self.dims,
            stem_type="deep",
            stem_width=self.dims[0] // 2,
        )
        model.maxpool = nn.Identity()  # type: ignore[assignment]
        return model
