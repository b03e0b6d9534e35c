"""Predicting a few images with experts, in few calls: for so little data they take the time.

The router's choice is read as plain numbers, and each expert's own scale and shift are kept ready.
One image, or several that go to the same expert, then take one LayerNorm, as without experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16
"""With more rows than this the arithmetic takes the time, not the calls."""

_is_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch gives it no types


class Sums(NamedTuple):
    """Scale and shift of every expert [E, 1, D], and as one entry per expert [D].

    Attributes:
        gamma: the scales.
        beta: the shifts.
        each: scale, shift and number [1, 1] of each expert.
        plain: the scale 1 and the shift 0 [D].
    """

    gamma: Tensor
    beta: Tensor
    each: list[tuple[Tensor, Tensor, Tensor]]
    plain: tuple[Tensor, Tensor]


class ExpertSums:
    """The shared scale and shift plus each expert's offsets, computed again when one changes.

    A change is an operation on a parameter, another parameter in its place, or other memory: what
    optimisers, `load_state_dict` and an assignment to ``.data`` do. Torch does not tell of writing
    into ``.data``.
    """

    def __init__(self) -> None:
        # Replaced as a whole: threads may share a merged model.
        self._held: tuple[tuple[int, ...], list[Tensor], Sums] | None = None

    def __reduce__(self) -> tuple[type[ExpertSums], tuple[()]]:
        return ExpertSums, ()  # copies and files begin without them

    def get(self, weight: Tensor, bias: Tensor, scales: Tensor, shifts: Tensor) -> Sums:
        """The sums of ``weight`` and ``bias`` [D] with ``scales`` and ``shifts`` [E, D]."""
        version = (
            id(weight), weight._version, weight.data_ptr(),
            id(bias), bias._version, bias.data_ptr(),
            id(scales), scales._version, scales.data_ptr(),
            id(shifts), shifts._version, shifts.data_ptr(),
        )  # fmt: skip
        held = self._held
        if held is None or held[0] != version:
            parameters = [weight, bias, scales, shifts]
            gamma, beta = weight + scales, bias + shifts
            numbers = torch.arange(len(gamma)).view(-1, 1, 1)
            sums = Sums(
                gamma.unsqueeze(1),
                beta.unsqueeze(1),
                list(zip(gamma.unbind(), beta.unbind(), numbers.unbind(), strict=True)),
                (torch.ones_like(weight), torch.zeros_like(weight)),
            )
            # What is held keeps its id, and its memory, so nothing else can be taken for it.
            held = version, parameters + [p.detach() for p in parameters], sums
            self._held = held
        return held[2]


def suits(x: Tensor, offsets: Tensor) -> bool:
    """Whether `moe_layer_norm_of_few` can take this input now."""
    return (
        0 < len(x) <= FEW
        and x.is_cpu
        and x.dtype == offsets.dtype
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not _is_tracing()
    )


def moe_layer_norm_of_few(
    x: Tensor, sums: Sums, router_weight: Tensor, router_bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`fused.moe_layer_norm` with one expert per sample, without gradients.

    Returns:
        The same; or None if a sample has no single best expert: there is a tie, or the router gives
        no numbers.
    """
    # Contiguous as in `fused`, so that sums are the same to the last bit, and so are the choices.
    tokens = (x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])).contiguous()
    p = torch.softmax(F.linear(tokens.mean(1), router_weight, router_bias), -1)
    experts = []
    for row in p.tolist():
        best = max(row)
        if row.count(best) > 1 or best != best:
            return None
        experts.append(row.index(best))
    if experts.count(experts[0]) == len(experts):
        gamma, beta, number = sums.each[experts[0]]
        y = torch.layer_norm(x, gamma.shape, gamma, beta, eps)
        return y, p, number if len(experts) == 1 else number.expand(len(experts), 1)
    index = torch.tensor(experts)
    y = torch.layer_norm(tokens, sums.plain[0].shape, *sums.plain, eps)
    gamma, beta = sums.gamma.index_select(0, index), sums.beta.index_select(0, index)
    torch.addcmul(beta, y, gamma, out=y)
    return y.view(x.shape), p, index.unsqueeze(1)
