"""Layer normalisation with a scale and shift per sample, using no more memory than LayerNorm.

The obvious code (normalise, gather, scale, shift) makes autograd keep the normalised activations
and several products besides the input. Here one autograd function keeps the input and its row
statistics, as the native LayerNorm does, and recomputes the rest in the backward pass.
`moe_layer_norm` also includes the routing, so that the gradient through the mean token is added
directly and needs no full-size tensor. Where no gradient is asked for, it takes a shorter way.
`moe_layer_norm_reference` is the same in plain PyTorch; tests compare them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def choose(p: Tensor, top_k: int, unit_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k experts of each row: index, probability, and the constant it is divided by.

    The quotient has value 1 for top-1 (or with ``unit_weights``), the shares of the chosen
    otherwise; its gradient reaches the router.
    """
    chosen, index = p.topk(top_k, dim=-1)
    constant = chosen.detach()
    return index, chosen, constant if unit_weights else constant.sum(-1, keepdim=True)


def moe_layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    expert_weight: Tensor,
    expert_bias: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    eps: float,
    top_k: int = 1,
    unit_weights: bool = False,
    router_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """MoE-LayerNorm of [B, ..., D] as in the paper's pseudocode.

    Returns:
        The normalised tensor, routing probabilities [B, E], chosen experts [B, k].
    """
    tokens = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
    p = torch.softmax(tokens.mean(1) @ router_weight.T + router_bias, -1)
    index, chosen, constant = choose(p, top_k, unit_weights)
    c = chosen / constant
    if not router_grad:
        c = c.detach()
    gamma = weight + (c.unsqueeze(-1) * expert_weight[index]).sum(1)
    beta = bias + (c.unsqueeze(-1) * expert_bias[index]).sum(1)
    mean = tokens.mean(-1, keepdim=True)
    var = tokens.var(-1, unbiased=False, keepdim=True)
    y = (tokens - mean) / torch.sqrt(var + eps) * gamma.unsqueeze(1) + beta.unsqueeze(1)
    return y.reshape(x.shape), p, index


def _normalise(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Forward of [B, T, D] with per-sample scale and shift: y, row means, row 1/std."""
    width = x.shape[-1]
    # Without a scale and a shift, the CPU kernel takes half as long again.
    one, zero = x.new_ones(width), x.new_zeros(width)
    y, mean, rstd = torch.native_layer_norm(x, (width,), one, zero, eps)
    torch.addcmul(beta.unsqueeze(1), y, gamma.unsqueeze(1), out=y)
    return y, mean, rstd


def _gradients(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, need_dx: bool
) -> tuple[Tensor | None, Tensor]:
    """Backward of `_normalise`: dx (if wanted), dgamma beside dbeta [B, 2D].

    By hand, dgamma = sum_t dy (x - mean) rstd splits into sums over tokens with row weights, which
    are matrix products: no normalised copy of x is made. A compiler avoids that copy with the plain
    formula too, but cannot fuse matrix products.
    """
    if torch.compiler.is_compiling():
        normal, pull = (x - mean) * rstd, dy * gamma.unsqueeze(1)
        both = torch.cat((_token_sum(dy * normal), _token_sum(dy)), 1)
        slope = (pull * normal).mean(-1, keepdim=True)
        dx = rstd * (pull - pull.mean(-1, keepdim=True) - normal * slope)
        return dx if need_dx else None, both
    rows = torch.cat((-mean * rstd, torch.ones_like(mean)), 2).transpose(1, 2)
    both = torch.bmm(rows, dy).flatten(1)
    buffer = dy * x
    both[:, : x.shape[-1]] += torch.bmm(rstd.transpose(1, 2), buffer).squeeze(1)
    if not need_dx:
        return None, both
    torch.mul(dy, gamma.unsqueeze(1), out=buffer)
    dx = torch.ops.aten.native_layer_norm_backward(
        buffer, x, (x.shape[-1],), mean, rstd, None, None, [True, False, False]
    )[0]
    return dx, both


def _token_sum(z: Tensor, block: int = 16) -> Tensor:
    """``z.sum(1)``, a few tokens at a time: compiled, it then reads memory in order."""
    blocks = z.shape[1] // block
    total = torch.unflatten(z[:, : blocks * block], 1, (blocks, block)).sum(2).sum(1)
    return total if z.shape[1] % block == 0 else total + z[:, blocks * block :].sum(1)


def _tokens(x: Tensor) -> Tensor:
    """[B, ..., D] as contiguous [B, T, D] in at least float32."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1]).contiguous()
    return flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat


class _SampleAffine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        tokens = _tokens(x)
        y, mean, rstd = _normalise(tokens, gamma, beta, eps)
        ctx.save_for_backward(x, gamma, mean, rstd)
        return y.reshape(x.shape).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rstd = ctx.saved_tensors
        need_dx = ctx.needs_input_grad[0]
        dx, both = _gradients(_tokens(dy), _tokens(x), gamma, mean, rstd, need_dx)
        dx = None if dx is None else dx.reshape(x.shape).to(x.dtype)
        return dx, *both.chunk(2, 1), None


class _MoELayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        expert_weight: Tensor,
        expert_bias: Tensor,
        router_weight: Tensor,
        router_bias: Tensor,
        eps: float,
        top_k: int,
        unit_weights: bool,
        router_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = _tokens(x)
        token_mean = tokens.mean(1)
        p = torch.softmax(torch.addmm(router_bias, token_mean, router_weight.T), -1)
        index, chosen, constant = choose(p, top_k, unit_weights)
        c = chosen / constant
        offsets = torch.cat((expert_weight, expert_bias), 1)[index]  # [B, k, 2D]
        mixed = offsets.squeeze(1) if top_k == 1 else torch.bmm(c.unsqueeze(1), offsets).squeeze(1)
        gamma, beta = torch.cat((weight, bias)).add(mixed).chunk(2, 1)
        y, mean, rstd = _normalise(tokens, gamma, beta, eps)
        straight = constant if router_grad else None
        ctx.save_for_backward(
            x, mean, rstd, gamma, offsets, router_weight, token_mean, p, index, c, straight
        )
        ctx.mark_non_differentiable(index)
        return y.reshape(x.shape).to(x.dtype), p, index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, gamma, offsets, router_weight, token_mean, p, index, c, straight = (
            ctx.saved_tensors
        )
        need_dx = ctx.needs_input_grad[0]
        dx, both = _gradients(_tokens(dy), _tokens(x), gamma, mean, rstd, need_dx)
        spread = both if c.shape[1] == 1 else (c.unsqueeze(-1) * both.unsqueeze(1)).flatten(0, 1)
        d_experts = both.new_zeros(p.shape[1], both.shape[1]).index_add_(0, index.flatten(), spread)
        if straight is not None:
            # Straight through: the chosen expert's offset scaled by p/det(p) pulls on p.
            dc = torch.bmm(offsets, both.unsqueeze(2)).squeeze(2)
            dp = dp.scatter_add(1, index, dc / straight)
        dlogits = p * (dp - (dp * p).sum(-1, keepdim=True))
        if dx is not None:
            dx.add_((dlogits @ router_weight).unsqueeze(1), alpha=1 / dx.shape[1])
            dx = dx.reshape(x.shape).to(x.dtype)
        router = (dlogits.T @ token_mean, dlogits.sum(0))
        return dx, None, None, *d_experts.chunk(2, 1), *router, None, None, None, None


def _without_gradient(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    expert_weight: Tensor,
    expert_bias: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    eps: float,
    top_k: int,
    unit_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass alone; `few` does it in fewer calls where they are what takes the time."""
    tokens = _tokens(x)
    p = torch.softmax(F.linear(tokens.mean(1), router_weight, router_bias), -1)
    index, chosen, constant = choose(p, top_k, unit_weights)
    c = (chosen / constant).unsqueeze(1)
    gamma = weight + torch.bmm(c, expert_weight[index]).squeeze(1)
    beta = bias + torch.bmm(c, expert_bias[index]).squeeze(1)
    y = _normalise(tokens, gamma, beta, eps)[0]
    return y.view(x.shape).to(x.dtype), p, index


def sample_affine_layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """LayerNorm of [B, ..., D] with each sample's own ``gamma`` and ``beta`` [B, D]."""
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _SampleAffine.apply(x, gamma, beta, eps)
        return y


def moe_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    expert_weight: Tensor,
    expert_bias: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    eps: float,
    top_k: int = 1,
    unit_weights: bool = False,
    router_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_layer_norm_reference`, fused. Shared ``weight`` and ``bias`` are frozen: no gradient."""
    arguments = x, weight, bias, expert_weight, expert_bias, router_weight, router_bias
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        if not torch.is_grad_enabled():
            return _without_gradient(*arguments, eps, top_k, unit_weights)
        out: tuple[Tensor, Tensor, Tensor] = _MoELayerNorm.apply(
            *arguments, eps, top_k, unit_weights, router_grad
        )
        return out
