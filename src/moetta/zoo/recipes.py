"""The recipes of the small source models: what is built, on what data, and how it is trained.

A recipe is a frozen dataclass and holds everything that training depends on, so that a weights
file and the recipe it came from can be compared field by field (see :mod:`moetta.zoo.shipped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from timm.layers import LayerNorm2d
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from moetta.suggest import nearest


def _stem_layers(in_chans: int, widths: Sequence[int], convs: int) -> list[tuple[int, int, int]]:
    """Channels in and out and the stride of each convolution; the first at a size halves it."""
    channels = [in_chans, *(width for width in widths for _ in range(convs))]
    return [(a, b, 1 if i % convs else 2) for i, (a, b) in enumerate(pairwise(channels))]


class ConvStem(nn.Module):
    """3 x 3 convolutions that halve the image step by step, in the place of timm's patch embedding.

    Small vision transformers learn far faster from few images when the first layers are
    convolutions. At each size the first convolution has stride 2, and ``convs - 1`` more follow.
    ``normed``, a LayerNorm over the channels follows each convolution: the nearer to the pixels a
    norm layer is, the more of a photometric shift can be undone in it.
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
                f"a convolutional stem needs a patch of 2, 4, 8, ..., not {patch_size}"
            )
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.patch_size = (patch_size, patch_size)
        widths = widths or (embed_dim // 2, *[embed_dim] * (stages - 1))
        if len(widths) != stages or widths[-1] != embed_dim:
            raise ValueError(
                f"a stem for patches of {patch_size} has {stages} widths, the last of them "
                f"{embed_dim}, not {widths}"
            )
        layers = _stem_layers(in_chans, widths, convs)
        self.proj = nn.ModuleList(
            nn.Conv2d(width, out, 3, stride=stride, padding=1) for width, out, stride in layers
        )
        norm = nn.LayerNorm if normed else nn.Identity
        self.norms = nn.ModuleList(norm(out) for _, out, _ in layers)

    def feat_ratio(self) -> tuple[int, int]:
        """How many pixels a token spans (timm asks for it)."""
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
    """Channels at each size of a stem of several convolutions; the last is ``dims[0]``."""
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
            raise ValueError(f"the stem ends in {self.dims[0]} channels, not {self.stem_widths}")
        layers: list[nn.Module] = []
        for width, out, stride in _stem_layers(3, self.stem_widths, self.stem_convs):
            layers += [nn.GELU()] if layers else []
            layers += [nn.Conv2d(width, out, 3, stride=stride, padding=1), LayerNorm2d(out)]
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class Augment:
    """Training augmentation: geometry, erasing and light photometry.

    None of the test corruptions is applied as such, but a jitter of brightness, contrast or
    saturation, which the CIFAR recipes use, overlaps the mild severities of the corruptions of
    those names.
    """

    flip: bool = False
    crop: int = 0
    """Pixels of reflected padding from which a window of the image's size is cropped."""
    cutout: int = 0
    """Side of the square replaced by the mean colour, in half of the images."""
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    """Each jitter draws its factor (brightness: its shift) uniformly in plus or minus this."""


@dataclass(frozen=True)
class Recipe:
    """Everything that training one source model depends on."""

    name: str
    data: str
    """``"digits"`` (the embedded benchmark) or ``"cifar10"``."""
    classes: int
    shape: ViTShape | ConvNeXtShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    steps: int
    batch_size: int = 100
    optimiser: Literal["adamw", "muon"] = "adamw"
    """``"muon"``: Muon for the weight matrices, AdamW for the rest, at one learning rate."""
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises; then it follows a cosine to 0."""
    clip: float = 1.0
    label_smoothing: float = 0.05
    ema: float = 0.999
    parts: bool = False
    """Adds the cross-entropies of the tens and of the units, read off the same logits: a class
    among a hundred is seen rarely, its digits often, and a ViT then starts to learn far sooner."""
    seed: int = 0
    augment: Augment = field(default_factory=Augment)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON card; tuples become lists, as JSON would make them."""
        return _plain({**asdict(self), "arch": type(self.shape).__name__.removesuffix("Shape")})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


_CIFAR: dict[str, Any] = {
    "data": "cifar10",
    "classes": 10,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.247, 0.2435, 0.2616),
    "batch_size": 200,
    "optimiser": "muon",
    "augment": Augment(
        flip=True, crop=4, cutout=8, brightness=0.15, contrast=0.25, saturation=0.25
    ),
}

_DIGITS: dict[str, Any] = {
    "data": "digits",
    "classes": 100,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
    "label_smoothing": 0.0,
    "parts": True,
    "ema": 0.998,
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="digits-vit",
            shape=ViTShape(dim=96, depth=4, heads=4, patch=8, stem_norm=True),
            steps=2_200,
            lr=1.2e-3,
            **_DIGITS,
        ),
        Recipe(
            name="digits-convnext",
            shape=ConvNeXtShape(
                dims=(32, 64, 128, 160), depths=(2, 2, 2, 1), kernel=5, stem_stride=4
            ),
            steps=2_000,
            **_DIGITS,
        ),
        Recipe(
            name="cifar-convnext",
            shape=ConvNeXtShape(
                dims=(96, 160, 224, 224),
                depths=(2, 3, 1, 0),
                kernel=5,
                stem_widths=(48, 96),
                stem_convs=2,
            ),
            steps=4_500,
            lr=3e-3,
            **_CIFAR,
        ),
        Recipe(
            name="cifar-vit",
            shape=ViTShape(
                dim=128,
                depth=4,
                heads=4,
                patch=8,
                stem_widths=(48, 96, 128),
                stem_convs=2,
                stem_norm=True,
            ),
            steps=6_000,
            lr=3e-3,
            **_CIFAR,
        ),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called ``name``."""
    if name not in RECIPES:
        raise ValueError(f"no source model is called {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
