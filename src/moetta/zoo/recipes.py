"""The recipes of the shipped models: which network is trained, on which data, and how.

A recipe holds everything that training depends on, so that a weights file and the recipe it came
from can be compared field by field (see `moetta.zoo.shipped_models`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from moetta.suggest import nearest
from moetta.zoo.networks import ConvNeXtShape, ResNetShape, ViTShape


@dataclass(frozen=True)
class Augment:
    """Training augmentation: geometry, erasing and light photometry.

    None of the test corruptions is applied as such. But the CIFAR recipes jitter brightness,
    contrast and saturation, which overlaps the mild severities of the corruptions of those names.
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
    """Everything that training a shipped model depends on."""

    name: str
    data: str
    """``"digits"`` (the embedded benchmark) or a key of `moetta.data.catalogue.SMALL_SETS`."""
    classes: int
    shape: ViTShape | ConvNeXtShape | ResNetShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    steps: int
    batch_size: int = 100
    optimiser: Literal["adamw", "muon"] = "adamw"
    """``"muon"`` is Muon for the weight matrices and AdamW for the rest, with one learning rate."""
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises; then it follows a cosine to 0."""
    clip: float = 1.0
    label_smoothing: float = 0.05
    ema: float = 0.999
    parts: bool = False
    """Adds the cross-entropies of the tens and of the units, from the same logits. Each of the 100
    classes is rare but its digits are common, so a ViT starts to learn much sooner."""
    seed: int = 0
    augment: Augment = field(default_factory=Augment)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON card; tuples become lists, as in JSON."""
        arch = type(self.shape).__name__.removesuffix("Shape")
        plain: dict[str, Any] = _plain({**asdict(self), "arch": arch})
        return plain


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
            name="digits-resnet",
            shape=ResNetShape(),
            steps=1_200,
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
        raise ValueError(f"no shipped model {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
