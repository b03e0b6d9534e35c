"""Finding the repeated blocks (transformer layers, residual blocks) of any network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from moetta.nn.norms import Norm, describe, listed

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Block:
    """One of the blocks a network repeats.

    Attributes:
        name: its dotted name in the network.
        module: the block.
        width: how many features it outputs.
        convolutional: whether it holds convolutions, which keep the features on the second axis.
    """

    name: str
    module: nn.Module
    width: int
    convolutional: bool

    def norms(self) -> list[Norm]:
        """Its norm layers, under their names in the network."""
        named = self.module.named_modules(prefix=self.name)
        return [norm for name, module in named if (norm := describe(name, module))]


def find_blocks(network: nn.Module) -> list[Block]:
    """The network's blocks, in order.

    A block is a child of a list or sequence of modules, of a class that occurs there more than
    once in the network, with a norm layer and at least two linear or convolution layers inside.
    Where such modules are nested (stages made of blocks), the innermost are the blocks.

    Raises:
        ValueError: there is none.
    """
    candidates: dict[str, nn.Module] = {}
    for parent, container in network.named_modules():
        if isinstance(container, _CONTAINERS):
            for key, child in container.named_children():
                if not isinstance(child, _CONTAINERS) and _is_like_a_block(child):
                    candidates[f"{parent}.{key}" if parent else key] = child
    repeated = Counter(type(module) for module in candidates.values())
    candidates = {n: m for n, m in candidates.items() if repeated[type(m)] > 1}
    inner = [n for n in candidates if not any(o.startswith(f"{n}.") for o in candidates)]
    if not inner:
        raise ValueError(
            "the model has no repeated blocks (modules of one class in an nn.Sequential or "
            "nn.ModuleList, with a norm layer and two linear or convolution layers each), which "
            f"this method needs; found {listed(network)}"
        )
    return [_describe(name, candidates[name]) for name in inner]


def _weighted(module: nn.Module) -> list[nn.Linear | _ConvNd]:
    return [m for m in module.modules() if isinstance(m, (nn.Linear, _ConvNd))]


def _is_like_a_block(module: nn.Module) -> bool:
    inside = [m for m in module.modules() if m is not module]
    return any(describe("", m) for m in inside) and len(_weighted(module)) > 1


def _describe(name: str, module: nn.Module) -> Block:
    layers = _weighted(module)
    # The last layer in a block writes to its output, be it a residual branch or a shortcut.
    last = layers[-1]
    width = last.out_features if isinstance(last, nn.Linear) else last.out_channels
    return Block(name, module, width, any(isinstance(m, _ConvNd) for m in layers))
