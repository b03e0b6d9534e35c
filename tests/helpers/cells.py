"""The meta-gradient generator's cell by its definition, and a ViT-B that costs next to nothing."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn

from moetta.nn.mgg import MGG


def random_mgg(seed: int = 0) -> MGG:
    """A generator in which every number matters."""
    g = torch.Generator().manual_seed(seed)
    mgg = MGG()
    with torch.no_grad():
        for parameter in mgg.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return mgg.requires_grad_(False)


def one_cell(
    p: dict[str, Tensor], x: Tensor, W: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of one scalar's cell, straight from the definition; the inner step by autograd."""
    gamma, beta = p["ttt_norm_weight"][0], p["ttt_norm_bias"][0]

    def norm(z: Tensor) -> Tensor:
        return (z - z.mean()) / (z.var(unbiased=False) + 1e-6).sqrt()

    q, k, v = (p[f"{name}_proj.weight"] @ x for name in "qkv")
    raw = p["learnable_ttt_lr_weight"][0, 0] @ x + p["learnable_ttt_lr_bias"][0, 0]
    eta = torch.sigmoid(raw) / 8 * max(0.0, 1 + p["learnable_token_idx"].item())
    W, b = W.clone().requires_grad_(), b.clone().requires_grad_()
    y = gamma * norm(k @ W + b) + beta
    dW, db = torch.autograd.grad(0.5 * ((y - (v - k)) ** 2).sum(), (W, b))
    W, b = (W - eta * dW).detach(), (b - eta * db).detach()
    o = q + gamma * norm(q @ W + b) + beta
    u = p["o_proj.weight"][0] @ (p["post_norm.weight"] * norm(o) + p["post_norm.bias"])
    return torch.tanh(u), W, b


def vit_b() -> nn.Module:
    """The paper's ViT-B with all weights zero, for pictures of 32 pixels: for counting only."""
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", img_size=32)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    return model
