"""Muon: momentum with orthogonalised matrix updates (K. Jordan and others, 2024).

In a short training AdamW mostly moves a few directions of each weight matrix; Muon moves all of
them alike, and the same network needs far fewer steps on CIFAR-10 (``docs/embedded.md``). PyTorch's
Muon takes two-dimensional parameters only; here a convolution counts as the matrix of its flattened
filters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients: five rounds bring singular values from 0.01..1 to about 0.7..1.2."""


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Approximates U V' for a matrix U S V', without decomposing it."""
    a, b, c = _QUINTIC
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    Updates are about as large as AdamW's (a root mean square of about 0.2 ``lr``), so that one
    learning rate suits both.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - momentum)
                ahead = p.grad.lerp(average, momentum).flatten(1)
                size = 0.2 * max(ahead.shape) ** 0.5
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(orthogonalised(ahead).view_as(p), alpha=-lr * size)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates a parameter: matrices, except the head's and the embeddings.

    A depthwise convolution is a stack of small filters, not a matrix.
    """
    if name.startswith(("head", "fc.")) or parameter.ndim not in (2, 4):
        return False
    return parameter.ndim == 2 or parameter.shape[1] > 1
