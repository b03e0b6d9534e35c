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
        known = isinstance(module, nn.MultiheadAttention) or _is_timms(module)
        if known or _hugging_face(module) is not None:
            return str(name)
    raise ValueError(f"its last block {block.name!r} has no attention layer of a known kind")


def _is_timms(module: nn.Module) -> bool:
    return isinstance(getattr(module, "qkv", None), nn.Linear) and hasattr(module, "num_heads")


def _hugging_face(module: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The query and key layers of a Hugging Face ViT's attention; None if it is not one."""
    if not hasattr(module, "num_attention_heads"):
        return None
    for names in (("q_proj", "k_proj"), ("query", "key")):  # transformers 5, and before
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            return query, key
    return None


def _prefix(network: nn.Module) -> int:
    """How many tokens come before the patches: the class token, registers and the like."""
    if hasattr(network, "num_prefix_tokens"):  # timm
        return int(network.num_prefix_tokens)  # type: ignore[arg-type]
    extra = {"register_tokens", "distillation_token", *CLASS_TOKENS}
    parameters = network.named_parameters()
    return sum(p.shape[-2] for n, p in parameters if n.rpartition(".")[2] in extra)


@contextlib.contextmanager
def class_attention(network: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Within the block, a forward pass leaves the class token's attention to each patch [B, N].

    It is the mean over heads, recomputed from queries and keys: fused kernels do not keep it.
    """
    module: Any = network.get_submodule(name)
    prefix = _prefix(network)
    found: list[Tensor] = []

    def hook(_: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        tokens = (arguments[0] if arguments else named["hidden_states"]).detach()
        query, key = _query_and_key(module, tokens)  # [B, heads, T, d]
        scores = query[:, :, :1] @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        found.append(scores.float().softmax(-1).mean(1)[:, 0, prefix:])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
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
    if (layers := _hugging_face(module)) is not None:
        heads = module.num_attention_heads
        parts = [layer(tokens).detach().view(batch, length, heads, -1) for layer in layers]
        query, key = (part.transpose(1, 2) for part in parts)
        return query, key
    split = module.qkv(tokens).detach().reshape(batch, length, 3, module.num_heads, -1)
    query, key, _ = split.permute(2, 0, 3, 1, 4).unbind(0)
    return module.q_norm(query).detach(), module.k_norm(key).detach()
