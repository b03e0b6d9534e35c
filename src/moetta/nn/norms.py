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

from moetta.nn import ranks


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
        if values_per_channel(x) > 1:
            x = batch_norm(x, self.weight, self.bias, self.eps)
        else:
            x = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        out: Tensor = self.tail(x)
        return out


def values_per_channel(x: Tensor) -> int:
    """How many values of [B, D, ...] the statistics of one channel come from."""
    share = ranks.current()
    own = x.numel() // x.shape[1]
    return own if share is None else own // share.held * share.total


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of [B, D, ...] over the whole batch."""
    share = ranks.current()
    if share is None:
        var, mean = torch.var_mean(x.transpose(0, 1).flatten(1), 1, correction=0)
        return mean, var
    values = share.real(x).transpose(0, 1).flatten(1)
    values = values if values.dtype == torch.float64 else values.float()
    count = values_per_channel(x)
    mean = share.sum(values.sum(1)) / count
    return mean, share.sum((values - mean[:, None]).square().sum(1)) / count


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise by the statistics of the whole batch, then scale and shift."""
    if ranks.current() is None:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    mean, var = batch_moments(x)
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = (x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return y.to(x.dtype)


def own_statistics(network: nn.Module) -> str | None:
    """The first BatchNorm that always takes the statistics of the rows it is given, if any."""
    # One inside a layer of ours is not called: only its values are used.
    ours = [name for name, module in network.named_modules() if hasattr(module, "batch_statistics")]
    for name, module in network.named_modules():
        alone = isinstance(module, _BatchNorm) and module.running_mean is None
        if alone and not any(name.startswith(f"{outer}.") for outer in ours):
            return name
    return None


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
    own = (batch_statistics or mean is None) and values_per_channel(x) > 1
    if own or mean is None:
        return batch_norm(x, None, None, norm.eps)
    return F.batch_norm(x, mean, var, eps=norm.eps)
