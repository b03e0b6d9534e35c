"""The corruptions of ImageNet-C and CIFAR-10-C, on whole batches, with random draws per image.

```python
noisy = corrupt(images, "gaussian_noise", severity=3, index=range(len(images)))
```
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moetta.data.corruptions import blur, digital, noise, spatter, textures, weather
from moetta.data.corruptions.constants import ALL, CLASSICAL, EXTRA, PRESETS, Preset
from moetta.data.corruptions.core import Job
from moetta.data.corruptions.rng import Streams
from moetta.suggest import nearest

__all__ = ["ALL", "CLASSICAL", "EXTRA", "MIN_SIDE", "check_name", "corrupt"]

MIN_SIDE = 28
_SMALL_SIDE = 64
# On the CPU a batch is split into parts of this many values, which fit in a core's cache. Where
# there is little work per value, larger parts spread the fixed cost of each.
_PART = 1 << 19
_PARTS = {"pixelate": 1 << 22, "jpeg_compression": 1 << 22}

_FUNCTIONS: dict[str, Callable[[Tensor, Job], Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "spatter": spatter.spatter,
    "gaussian_blur": blur.gaussian_blur,
    "saturate": digital.saturate,
}


def check_name(name: str) -> None:
    """Refuse an unknown corruption.

    Raises:
        ValueError: If there is no such corruption; names the nearest.
    """
    if name not in _FUNCTIONS:
        hint = nearest(str(name).lower().replace("-", "_"), ALL)
        raise ValueError(f"unknown corruption {name!r}; {hint}")


@torch.no_grad()
def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    index: Tensor | Sequence[int],
    seed: int = 0,
    constants: Literal["auto", "imagenet", "cifar"] = "auto",
    frost_folder: Path | None = None,
) -> Tensor:
    """Corrupt a batch.

    The result for an image depends only on its pixels, its `index` and `seed`: not on its batch,
    its place in the batch, or (up to float rounding) the device.

    Args:
        images: uint8 [B, 3, H, W] on any device; H and W at least 28, not necessarily equal.
        name: One of `ALL`.
        severity: 1 (mild) to 5.
        index: Each image's number in its data set, of length B; not negative.
        seed: Seeds the random draws.
        constants: Whose severities to use: ImageNet-C's ("imagenet"), CIFAR-10-C's ("cifar"), or
            CIFAR-10-C's if the shorter side has at most 64 pixels and else ImageNet-C's ("auto").
        frost_folder: The folder of ImageNet-C's six frost photographs; by default frost is
            procedural.

    Returns:
        uint8 [B, 3, H, W] on the device of `images`.

    Raises:
        ValueError: If an argument is not as described.
        FileNotFoundError: If `frost_folder` lacks a photograph.
    """
    check_name(name)
    _check_images(images)
    if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")
    if constants not in ("auto", *PRESETS):
        raise ValueError(f"constants must be 'auto', 'imagenet' or 'cifar', got {constants!r}")
    preset: Preset
    if constants == "auto":
        preset = "cifar" if min(images.shape[-2:]) <= _SMALL_SIDE else "imagenet"
    else:
        preset = constants
    if frost_folder is not None:
        textures.check_folder(Path(frost_folder))
    streams = Streams.of(seed, _check_index(index, len(images)), name, images.device)
    setting = PRESETS[preset][name][severity - 1]
    folder = None if frost_folder is None else Path(frost_folder)

    if not len(images):
        return images.clone()
    step = len(images)
    if images.device.type == "cpu":
        step = max(1, _PARTS.get(name, _PART) // images[0].numel())
    parts = [
        _FUNCTIONS[name](
            images[start : start + step].contiguous(),
            Job(setting, streams.narrow(start, start + step), preset, folder),
        )
        for start in range(0, len(images), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a torch tensor, got {type(images).__name__}")
    if images.dtype != torch.uint8:
        raise ValueError(
            f"images must be uint8 levels 0 .. 255, got {images.dtype}; "
            "for floats in 0 .. 1 use (images * 255).round().to(torch.uint8)"
        )
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"images must be [B, 3, H, W], got {list(images.shape)}; "
            "add a batch dimension, put channels first, or repeat a grey channel three times"
        )
    if min(images.shape[-2:]) < MIN_SIDE:
        raise ValueError(
            f"images must be at least {MIN_SIDE} pixels high and wide, "
            f"got {images.shape[-2]} x {images.shape[-1]}; enlarge them first"
        )


def _check_index(index: Tensor | Sequence[int], count: int) -> Tensor:
    numbers = torch.as_tensor(index if isinstance(index, Tensor) else list(index))
    if numbers.numel() == 0:
        numbers = numbers.to(torch.int64)
    if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"index must hold integers, got {numbers.dtype}")
    if numbers.shape != (count,):
        raise ValueError(
            f"index must hold one number for each of the {count} images, "
            f"got shape {list(numbers.shape)}"
        )
    if count and int(numbers.min()) < 0:
        raise ValueError("index must not be negative; number the images from 0")
    return numbers.to("cpu", torch.int64)
