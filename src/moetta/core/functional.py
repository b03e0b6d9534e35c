"""The few formulas that several methods share, as plain functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy (natural log) of each row's softmax, in float32 or better.

    >>> round(entropy(torch.zeros(1, 4)).exp().item(), 4)
    4.0
    """
    log_p = (
        logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
    )
    return -(log_p.exp() * log_p).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` holds; zero, with a zero gradient, where it holds nowhere.

    >>> masked_mean(torch.tensor([1.0, 5.0]), torch.tensor([False, False])).item()
    0.0
    """
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def reliability(entropies: Tensor, e0: float) -> Tensor:
    """EATA's weight ``exp(e0 - H)``, without gradient: sure predictions count more."""
    return (e0 - entropies.detach()).exp()


def log_classes(logits: Tensor) -> float:
    """Ln C, the largest possible entropy; thresholds are given as shares of it."""
    return math.log(logits.shape[-1])


def symmetric_cross_entropy(left: Tensor, right: Tensor) -> Tensor:
    """Half the cross-entropy of each prediction against the other, per sample [B]."""
    a, b = left.float().log_softmax(-1), right.float().log_softmax(-1)
    return -0.5 * (b.exp() * a + a.exp() * b).sum(-1)


def opinion(logits: Tensor) -> Tensor:
    """COME's opinion, which may also say "I do not know": C + 1 shares (Zhang et al., 2025).

    Each class gets the evidence exp z, ignorance the evidence C. No gradient reaches the
    length of the logits, so that they cannot grow to look sure.

    >>> [round(share, 4) for share in opinion(torch.tensor([[2.0, 0.0, 0.0]]))[0].tolist()]
    [0.5964, 0.0807, 0.0807, 0.2421]
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    length = z.detach().norm(dim=-1, keepdim=True)
    tiny = torch.finfo(z.dtype).tiny
    z = z / z.norm(dim=-1, keepdim=True).clamp(min=tiny) * length
    ignorance = torch.full_like(z[..., :1], log_classes(logits))
    return torch.cat((z, ignorance), -1).softmax(-1)


def opinion_entropy(logits: Tensor) -> Tensor:
    """The entropy of COME's opinion.

    >>> round(opinion_entropy(torch.tensor([[2.0, 0.0, 0.0]])).item(), 4)
    1.0579
    """
    shares = opinion(logits) + 1e-7
    return -(shares * shares.log()).sum(-1)


UNCERTAINTIES = {"entropy": entropy, "come": opinion_entropy}
"""What methods that minimise entropy may minimise instead."""
