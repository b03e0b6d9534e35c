"""Recording a network's inner features: one vector per sample and layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moetta.nn.blocks import find_blocks
from moetta.nn.norms import Norm, find_norms

CLASS_TOKENS = ("cls_token", "class_token", "cls_tokens", "class_tokens", "cls_embedding")


class Features:
    """Where to listen: after one norm layer of every block, and after the final one.

    These are the first norm of every block but the first (which sees little beyond the patches)
    and the last norm of the network. A sample's vector at a layer is the class token if the model
    has one, else the mean over tokens or positions. On a ViT this is each block's output as the
    next block sees it.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.class_token = any(
            name.rpartition(".")[2] in CLASS_TOKENS for name, _ in network.named_parameters()
        )
        self.layers = _listened(network)

    @contextlib.contextmanager
    def listening(self) -> Iterator[dict[str, Tensor]]:
        """Within the block, a forward pass leaves each layer's output under the layer's name.

        Afterwards the hooks are removed.
        """
        heard: dict[str, Tensor] = {}
        handles = []
        for norm in self.layers:
            # By name: a BatchNorm may have been replaced since.
            module = self.network.get_submodule(norm.name)

            def hook(_: nn.Module, __: object, output: Tensor, name: str = norm.name) -> None:
                heard[name] = output

            handles.append(module.register_forward_hook(hook))
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()

    def join(self, heard: dict[str, Tensor]) -> Tensor:
        """One vector per sample: all layers' features side by side, in float32.

        Raises:
            ValueError: the layers did not run, or their outputs carry no gradient.
        """
        found = [(norm, heard[norm.name]) for norm in self.layers if norm.name in heard]
        if not found:
            raise ValueError("none of the model's norm layers ran in its forward pass")
        if torch.is_grad_enabled() and not any(x.requires_grad for _, x in found):
            raise ValueError(
                "the model's inner features carry no gradient; if it uses gradient checkpointing, "
                "use the kind with use_reentrant=False"
            )
        return torch.cat([self._vector(norm, x).float() for norm, x in found], dim=1)

    def _vector(self, norm: Norm, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x
        if norm.channels_first or norm.kind != "layer":
            return x.flatten(2).mean(2)
        if self.class_token and x.dim() == 3:
            return x[:, 0]
        return x.flatten(1, -2).mean(1)


def _listened(network: nn.Module) -> list[Norm]:
    norms = find_norms(network)
    try:
        blocks = find_blocks(network)
    except ValueError:
        return norms[1:] or norms
    inside = [block.norms() for block in blocks]
    order = [norm.name for norm in norms]
    final = norms[-1]
    if order.index(final.name) <= order.index(inside[-1][-1].name):
        # Nothing after the blocks: the last norm of the last one. The least nested, because a
        # shortcut's (`downsample.1`) may come after the main path's (`bn2`).
        final = min(reversed(inside[-1]), key=lambda norm: norm.name.count("."))
    firsts = [of_block[0] for of_block in inside[1:]]
    return firsts if final in firsts else [*firsts, final]
