"""Muon: momentum whose matrix updates are made orthogonal (K. Jordan and others, 2024).

AdamW spends most of a short training on a few directions of each weight matrix; Muon moves all of
them alike. On CIFAR-10 the same network then needs far fewer steps (``docs/embedded.md``).
PyTorch's own class takes two-dimensional parameters only; here a convolution counts as the matrix
of its flattened filters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients: five rounds bring singular values from 0.01..1 to about 0.7..1.2."""


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """About U V' for a matrix U S V', without a decomposition."""
    a, b, c = _QUINTIC
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    Updates have AdamW's usual size (a root mean square of about 0.2 ``lr``), so that one learning
    rate suits both.
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
        """Moves every parameter that has a gradient."""
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
    """Whether Muon suits a parameter: matrices inside the network, not its head or embeddings.

    A depthwise convolution is a stack of small filters, not a matrix.
    """
    if name.startswith("head") or parameter.ndim not in (2, 4):
        return False
    return parameter.ndim == 2 or parameter.shape[1] > 1
