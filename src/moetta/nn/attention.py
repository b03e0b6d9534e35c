"""What the class token of a Vision Transformer attends to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from moetta.nn.blocks import Block
from moetta.nn.features import CLASS_TOKENS


def find_attention(network: nn.Module, block: Block) -> str:
    """The name of a block's self-attention layer.

    Raises:
        ValueError: the network has no class token, or no attention layer of a known kind.
    """
    names = {name.rpartition(".")[2] for name, _ in network.named_parameters()}
    if not names & set(CLASS_TOKENS):
        raise ValueError("it has no class token")
    for name, module in block.module.named_modules(prefix=block.name):
        if isinstance(module, nn.MultiheadAttention) or _is_timms(module):
            return str(name)
    raise ValueError(f"its last block {block.name!r} has no attention layer of a known kind")


def _is_timms(module: nn.Module) -> bool:
    return isinstance(getattr(module, "qkv", None), nn.Linear) and hasattr(module, "num_heads")


@contextlib.contextmanager
def class_attention(network: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Within the block, a forward pass leaves the class token's attention to each patch [B, N].

    It is the mean over heads, recomputed from queries and keys: fused kernels do not keep it.
    """
    module: Any = network.get_submodule(name)
    # Registers and similar tokens lie between the class token and the patches.
    prefix = int(getattr(network, "num_prefix_tokens", 1))
    found: list[Tensor] = []

    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        tokens = arguments[0].detach()
        query, key = _query_and_key(module, tokens)  # [B, heads, T, d]
        scores = query[:, :, :1] @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        found.append(scores.float().softmax(-1).mean(1)[:, 0, prefix:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def _query_and_key(module: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, _ = tokens.shape
    if isinstance(module, nn.MultiheadAttention):
        both = nn.functional.linear(tokens, module.in_proj_weight, module.in_proj_bias)
        split = both.detach().view(batch, length, 3, module.num_heads, -1)
        query, key, _ = split.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key
    split = module.qkv(tokens).detach().reshape(batch, length, 3, module.num_heads, -1)
    query, key, _ = split.permute(2, 0, 3, 1, 4).unbind(0)
    return module.q_norm(query).detach(), module.k_norm(key).detach()
