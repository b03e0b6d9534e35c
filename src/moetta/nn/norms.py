"""Finding the normalisation layers of any network, and what kind each is."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Norm:
    """A normalisation layer with an affine part, and its place in the network.

    Attributes:
        name: its dotted name in the network.
        module: the layer.
        kind: what it normalises over.
        channels_first: a LayerNorm over the second axis of [B, D, H, W] (ConvNeXt's stem and
            downsampling), not over the last.
    """

    name: str
    module: nn.Module
    kind: Literal["layer", "group", "batch"]
    channels_first: bool = False

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Its scale and shift, with their full names."""
        return [(f"{self.name}.{k}", p) for k, p in self.module.named_parameters(recurse=False)]


def describe(name: str, module: nn.Module) -> Norm | None:
    """The module as a `Norm`, or None if it is not one that can be trained."""
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    if isinstance(module, _BatchNorm):
        return Norm(name, module, "batch")
    if isinstance(module, nn.GroupNorm):
        return Norm(name, module, "group")
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return Norm(name, module, "layer", _is_channels_first(module))
    return None


def _is_channels_first(norm: nn.LayerNorm) -> bool:
    """Whether a LayerNorm works on the second axis of [B, D, H, W].

    Libraries have many such classes (timm's LayerNorm2d and others, Hugging Face's with a data
    format), so we try: a layer over the last axis cannot take [1, D, 1, 1].
    """
    if type(norm).forward is nn.LayerNorm.forward or norm.weight.numel() == 1:
        return False
    one_pixel = norm.weight.detach().new_zeros(1, norm.weight.numel(), 1, 1)
    try:
        with torch.no_grad():
            return norm.forward(one_pixel).shape == one_pixel.shape
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False


def listed(network: nn.Module) -> str:
    """The kinds of layers a network has, the most frequent first.

    >>> listed(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    '2 Linear, 1 ReLU'
    """
    kinds = Counter(type(m).__name__ for m in network.modules() if not list(m.children()))
    return ", ".join(f"{count} {name}" for name, count in kinds.most_common(8)) or "no layers"


def find_norms(network: nn.Module) -> list[Norm]:
    """All trainable norm layers, in the order of `named_modules`.

    Raises:
        ValueError: there is none; the message lists the layers there are.
    """
    norms = [norm for item in network.named_modules() if (norm := describe(*item))]
    if not norms:
        raise ValueError(
            "the model has no LayerNorm, GroupNorm or BatchNorm with trainable scale and shift, "
            f"which this method needs; found {listed(network)}"
        )
    return norms


def parse_indices(text: str, count: int, what: str = "layers") -> set[int]:
    """Layer numbers from ranges such as ``"0-5,8"``.

    >>> sorted(parse_indices("0-2,4", 6))
    [0, 1, 2, 4]

    Raises:
        ValueError: the text is not of that form, or goes beyond the last layer.
    """
    chosen: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f'{what}: cannot read {part!r}; write ranges such as "0-5,8"')
        low = int(match[1])
        high = int(match[2] or low)
        if low > high or high >= count:
            raise ValueError(
                f"{what}: {part!r} is not within the model's norm layers 0-{count - 1}"
            )
        chosen.update(range(low, high + 1))
    return chosen


class BatchStatNorm(nn.Module):
    """A BatchNorm that normalises by the current batch, as in Tent.

    One value per channel has no variance: such a batch (one image on a 1 x 1 map) is normalised by
    the source statistics instead of failing.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm, _BatchNorm)
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        self.tail = trailing_activation(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the batch's own mean and variance."""
        if x.numel() // x.shape[1] > 1:
            x = F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        else:
            x = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        out: Tensor = self.tail(x)
        return out


def trailing_activation(norm: nn.Module) -> nn.Module:
    """What timm's combined layers (such as BatchNormAct2d) do after normalising, if anything."""
    parts = [getattr(norm, name, None) for name in ("drop", "act")]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return nn.Sequential(*modules) if modules else nn.Identity()


def normalise(norm: nn.Module, x: Tensor, batch_statistics: bool = False) -> Tensor:
    """What a GroupNorm or BatchNorm does before its scale and shift."""
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=norm.eps)
    assert isinstance(norm, _BatchNorm)
    mean, var = norm.running_mean, norm.running_var
    own = (batch_statistics or mean is None) and x.numel() // x.shape[1] > 1
    if own or mean is None:
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)
    return F.batch_norm(x, mean, var, eps=norm.eps)
