"""How an image becomes what the model expects, according to the model's own config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models import get_pretrained_cfg
from torch import nn

from moetta.data.image_files import Transform

_GIVE = (
    "Say what it expects: preprocess=Preprocess(mean=..., std=..., size=...), or its torchvision "
    "weights' transforms(), or its Hugging Face image processor."
)


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop and normalise.

    Attributes:
        mean: Mean by channel, for pixels in [0, 1].
        std: Standard deviation by channel.
        size: Height and width that the model sees.
        crop_pct: The share of the resized image's side that the crop keeps.
        crop_mode: "center" (keeps the aspect ratio), "squash" (does not) or "border" (pads), as in
            timm.
        interpolation: How Pillow resizes it: "bilinear", "bicubic", ...
        source: Where these values come from, for the protocol card.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] = (224, 224)
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bilinear"
    source: str = "given"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = tuple(float(v) for v in getattr(self, name))
            if len(values) != 3:
                raise ValueError(f"{name} must be 3 numbers (R, G, B), got {values}")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "size", (int(self.size[0]), int(self.size[1])))

    @property
    def normalise(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and std, as a stream takes them."""
        return self.mean, self.std

    def transform(self) -> Transform:
        """Resizes and crops an RGB image into a uint8 tensor [3, H, W]."""
        made: Transform = create_transform(
            input_size=(3, *self.size),
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            mean=self.mean,
            normalize=False,
        )
        return made

    def card(self) -> dict[str, Any]:
        """All fields as plain JSON data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def preprocess_for(model: nn.Module | str | None, preprocess: Any = "model") -> Preprocess:
    """The preprocessing for a model.

    Args:
        model: A timm model or the name of one, a Hugging Face model whose image processor is in the
            local cache, or any other model if `preprocess` says what it expects.
        preprocess: "model" takes everything from the model's own config. "paper" resizes the
            shorter side to 256 (bilinear) and crops 224, with the model's mean and std. Or a
            `Preprocess`, torchvision weights or their transforms, or a Hugging Face image
            processor.

    Raises:
        ValueError: If neither the model nor `preprocess` says what it expects, or they disagree.
    """
    if isinstance(preprocess, str):
        if preprocess not in ("model", "paper"):
            raise ValueError(f'preprocess must be "model", "paper" or given, got {preprocess!r}')
        if model is None:
            raise ValueError(f"preprocess={preprocess!r} needs a model. {_GIVE}")
        own = own_preprocess(model)
        if own is None:
            raise ValueError(f"{_describe(model)} does not say what it expects. {_GIVE}")
        if preprocess == "model":
            return own
        wanted = replace(
            own,
            size=(224, 224),
            crop_pct=0.875,
            crop_mode="center",
            interpolation="bilinear",
            source=f"paper, mean and std from {own.source}",
        )
    else:
        wanted = _given(preprocess)
    if model is not None:
        check_preprocess(model, wanted)
    return wanted


def check_preprocess(model: nn.Module | str, preprocess: Preprocess) -> None:
    """Refuses a preprocessing that contradicts the model's own config.

    Raises:
        ValueError: If mean, std or (for a model that takes only one) the size differ.
    """
    own = own_preprocess(model)
    if own is None:
        return
    for name in ("mean", "std"):
        theirs, ours = getattr(own, name), getattr(preprocess, name)
        if any(abs(a - b) > 1e-3 for a, b in zip(theirs, ours, strict=True)):
            raise ValueError(
                f"{_describe(model)} was trained with {name} {_short(theirs)}, but the images "
                f"would be normalised with {name} {_short(ours)}, a mistake that looks like a "
                'distribution shift. Use preprocess="model" or "paper", which take mean and std '
                "from the model; if the model's config is wrong, correct its pretrained_cfg."
            )
    fixed = _fixed_size(model)
    if fixed is not None and fixed != preprocess.size:
        raise ValueError(
            f"{_describe(model)} takes only images of {fixed[0]} x {fixed[1]}, but they would be "
            f'{preprocess.size[0]} x {preprocess.size[1]}. Use preprocess="model".'
        )


def own_preprocess(model: nn.Module | str) -> Preprocess | None:
    """What a model's own config says, or None if it has none."""
    if isinstance(model, str):
        found = get_pretrained_cfg(model)
        if found is None:
            raise ValueError(f"timm has no model {model!r}")
        return _from_timm(found.to_dict(), _describe(model), None)
    model = _unwrap(model)
    cfg = getattr(model, "pretrained_cfg", None)
    if cfg:
        return _from_timm(dict(cfg), _describe(model), _fixed_size(model))
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return _from_cache(name) if name else None


def _from_timm(cfg: dict[str, Any], what: str, size: tuple[int, int] | None) -> Preprocess | None:
    if not cfg.get("mean") or not cfg.get("std"):  # timm would guess ImageNet's
        return None
    found = resolve_data_config(pretrained_cfg=cfg)
    return Preprocess(
        mean=found["mean"],
        std=found["std"],
        size=size or found["input_size"][-2:],
        crop_pct=found["crop_pct"],
        crop_mode=found["crop_mode"],
        interpolation=found["interpolation"],
        source=what,
    )


def _from_cache(name: str) -> Preprocess | None:
    try:
        from transformers import AutoImageProcessor

        return _from_processor(AutoImageProcessor.from_pretrained(name, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _given(given: Any) -> Preprocess:
    if isinstance(given, Preprocess):
        return given
    if hasattr(given, "image_mean"):
        return _from_processor(given)
    if callable(getattr(given, "transforms", None)):  # torchvision weights
        given = given.transforms()
    if hasattr(given, "crop_size") and hasattr(given, "resize_size"):
        crop, resized = given.crop_size[0], given.resize_size[0]
        return Preprocess(
            mean=tuple(given.mean),
            std=tuple(given.std),
            size=(crop, crop),
            crop_pct=_share(crop, resized),
            interpolation=given.interpolation.value,
            source="torchvision weights",
        )
    raise ValueError(f"cannot take a preprocessing from {type(given).__name__}. {_GIVE}")


def _from_processor(p: Any) -> Preprocess:
    """What a Hugging Face image processor does."""
    from PIL.Image import Resampling

    def part(size: Any, name: str) -> Any:  # older processors have dictionaries
        return size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)

    def sides(size: Any) -> tuple[int, int] | None:
        height, width = part(size, "height"), part(size, "width")
        return (height, width) if height and width else None

    crop = sides(p.crop_size) if getattr(p, "do_center_crop", False) else None
    edge, exact = part(p.size, "shortest_edge"), sides(p.size)
    crop_pct = getattr(p, "crop_pct", None)
    mode = "center"
    if exact:  # resized to exactly this size, then perhaps cropped
        mode, size, share = "squash", crop or exact, _share((crop or exact)[0], exact[0])
    elif edge and crop:
        size, share = crop, _share(crop[0], edge)
    elif edge and crop_pct:  # ConvNeXt's rule: large sizes are squashed, small ones cropped
        size, share = (edge, edge), 1.0 if edge >= 384 else float(crop_pct)
        mode = "squash" if edge >= 384 else "center"
    else:
        raise ValueError(f"cannot tell how {type(p).__name__} resizes and crops. {_GIVE}")
    if not getattr(p, "do_normalize", True) or abs(p.rescale_factor - 1 / 255) > 1e-6:
        raise ValueError(f"{type(p).__name__} does not rescale by 1/255 and normalise. {_GIVE}")
    return Preprocess(
        mean=tuple(p.image_mean),
        std=tuple(p.image_std),
        size=size,
        crop_pct=share,
        crop_mode=mode,
        interpolation=Resampling(int(p.resample)).name.lower(),
        source=f"Hugging Face {type(p).__name__}",
    )


def _share(crop: int, resized: int) -> float:
    """The crop_pct that makes timm, which divides by it and rounds down, resize to `resized`."""
    share = crop / resized
    return share if int(crop / share) == resized else crop / (resized + 0.5)


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside wrappers such as adapters and DistributedDataParallel."""
    while not getattr(model, "pretrained_cfg", None):
        inner = next(
            (
                m
                for m in (getattr(model, n, None) for n in ("model", "module"))
                if isinstance(m, nn.Module)
            ),
            None,
        )
        if inner is None or hasattr(model, "config"):
            return model
        model = inner
    return model


def _fixed_size(model: nn.Module | str) -> tuple[int, int] | None:
    """The only image size that the model takes, or None if it takes several."""
    if isinstance(model, str):
        cfg = get_pretrained_cfg(model)
        if cfg is None or not cfg.fixed_input_size:
            return None
        height, width = cfg.input_size[-2:]
        return height, width
    model = _unwrap(model)
    embed = getattr(model, "patch_embed", None)
    size, strict = getattr(embed, "img_size", None), getattr(embed, "strict_img_size", False)
    return (int(size[0]), int(size[1])) if size is not None and strict else None


def _describe(model: nn.Module | str) -> str:
    if isinstance(model, str):
        found = get_pretrained_cfg(
            model
        )  # other timm releases may mean other weights by a bare name
        cfg = found.to_dict() if found else {"architecture": model}
    else:
        cfg = getattr(_unwrap(model), "pretrained_cfg", None) or {}
    arch, tag = cfg.get("architecture"), cfg.get("tag")
    if arch:
        return f"timm {arch}.{tag}" if tag else f"timm {arch}"
    return type(model).__name__


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{v:.4g}" for v in values) + ")"
