"""Plain re-computation of what methods do: autograd and arithmetic, nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

LR, MOMENTUM = 0.05, 0.9


def entropies(logits: Tensor) -> Tensor:
    p = logits.softmax(1)
    return -(p * p.log()).sum(1)


def opinion_entropies(z: Tensor) -> Tensor:
    """COME's definition, term by term, with the length of the logits held constant."""
    length = z.norm(dim=1, keepdim=True)
    z = z / length * length.detach()
    e = z.exp()
    total = e.sum(1, keepdim=True) + z.shape[1]
    b = torch.cat((e / total, z.shape[1] / total), 1) + 1e-7
    return -(b * b.log()).sum(1)


OBJECTIVES = {"entropy": entropies, "come": opinion_entropies}


def ln_c(logits: Tensor) -> float:
    return math.log(logits.shape[1])


class Plain:
    """A model, the parameters that are trained, and SGD with momentum written out."""

    def __init__(
        self, model: nn.Module, keep: Callable[[str], bool] = lambda name: True, lr: float = LR
    ) -> None:
        self.model, self.lr = model.eval().requires_grad_(False), lr
        self.names, self.parameters = [], []
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm) and keep(name):
                self.names += [f"{name}.weight", f"{name}.bias"]
                self.parameters += [module.weight, module.bias]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.start = [p.detach().clone() for p in self.parameters]
        self.velocity: list[Tensor] | None = None

    def gradient(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.parameters))

    def step(self, grads: list[Tensor]) -> None:
        if self.velocity is None:
            self.velocity = [g.clone() for g in grads]
        else:
            pairs = zip(self.velocity, grads, strict=True)
            self.velocity = [MOMENTUM * v + g for v, g in pairs]
        self.set([p - self.lr * v for p, v in zip(self.parameters, self.velocity, strict=True)])

    def set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)

    def restart(self) -> None:
        self.set(self.start)
        self.velocity = None

    def assert_agrees(self, state: dict[str, Tensor]) -> None:
        """The adapter trains the same parameters, and they have the same values."""
        trained = [k.removeprefix("param.") for k in state if k.startswith("param.")]
        assert trained == self.names
        for name, mine in zip(self.names, self.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-5, atol=1e-6)
        for name, mine in zip(self.names, self.velocity or [], strict=False):
            theirs = state[f"optim.{name}.momentum_buffer"]
            torch.testing.assert_close(theirs, mine.detach(), rtol=1e-4, atol=1e-5)
        if self.velocity is None:
            assert not [k for k in state if k.startswith("optim.")]
