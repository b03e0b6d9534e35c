"""The recipes of the small source models: what is built, on what data, and how it is trained.

A recipe is a frozen dataclass and holds everything that training depends on, so that a weights
file and the recipe it came from can be compared field by field (see :mod:`moetta.sources.shipped`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from timm.layers import LayerNorm2d
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class ConvStem(nn.Module):
    """Two or more 3 x 3 convolutions of stride 2 in the place of timm's patch embedding.

    Small vision transformers learn far faster from few images when the first layers are
    convolutions. There is no norm layer in here: a ViT's norm layers stay its blocks' own.
    """

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: Any
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
        layers: list[nn.Module] = []
        width = in_chans
        for stage in range(stages):
            out = embed_dim if stage else embed_dim // 2
            layers += [nn.Conv2d(width, out, 3, stride=2, padding=1), nn.GELU()]
            width = out
        self.proj = nn.Sequential(*layers[:-1])

    def feat_ratio(self) -> tuple[int, int]:
        """How many pixels a token spans (timm asks for it)."""
        return self.patch_size

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, T, D]."""
        return self.proj(x).flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class ViTShape:
    """A small timm ``VisionTransformer``."""

    dim: int = 96
    depth: int = 6
    heads: int = 3
    patch: int = 4
    conv_stem: bool = True
    drop_path: float = 0.0
    image: int = 32

    def build(self, classes: int) -> nn.Module:
        """The untrained network; its initial weights come from torch's global generator."""
        extra: dict[str, Any] = {"embed_layer": ConvStem} if self.conv_stem else {}
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
    """A small timm ``ConvNeXt`` (channels-last blocks) whose stem halves a 32-pixel image once."""

    dims: tuple[int, int, int, int] = (40, 80, 160, 256)
    depths: tuple[int, int, int, int] = (1, 2, 2, 1)
    kernel: int = 7
    stem_stride: int = 2
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
        # timm's stems shrink the image four times before the first stage: too much for 32 pixels.
        model.stem = nn.Sequential(
            nn.Conv2d(3, self.dims[0], 3, stride=self.stem_stride, padding=1),
            LayerNorm2d(self.dims[0]),
        )
        return model


@dataclass(frozen=True)
class Augment:
    """Training augmentation: geometry, erasing and light photometry, never a test corruption."""

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

    def shortened(self, steps: int) -> Recipe:
        """The same recipe with fewer steps."""
        return replace(self, steps=steps)

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
            shape=ViTShape(dim=128, depth=4, heads=4, patch=8),
            steps=3_000,
            lr=1.2e-3,
            **_DIGITS,
        ),
        Recipe(
            name="digits-convnext",
            shape=ConvNeXtShape(dims=(32, 64, 128, 160), depths=(2, 2, 3, 1)),
            steps=1_500,
            **_DIGITS,
        ),
        Recipe(name="cifar-convnext", shape=ConvNeXtShape(drop_path=0.02), steps=11_000, **_CIFAR),
        Recipe(name="cifar-vit", shape=ViTShape(), steps=10_000, lr=1e-3, **_CIFAR),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called ``name``."""
    if name not in RECIPES:
        raise ValueError(f"no source model is called {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
