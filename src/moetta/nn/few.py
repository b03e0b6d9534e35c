"""Predicting a few images with experts, in few calls: for so little data they take the time.

The router's choice is read as plain numbers, and each expert's own scale and shift are kept ready.
One image, or several that go to the same expert, then take one LayerNorm, as without experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def moe_layer_norm_of_few(
    x: Tensor, layer: nn.Module, router: nn.Module, kept: ExpertSums, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`fused.moe_layer_norm` for a layer with one expert per sample, if nothing is differentiated.

    Returns:
        The same; or None where only the usual way will do. It will if a sample has no single best
        expert: there is a tie, or the router gives no numbers.
    """
    shape = x.shape
    own: Any = layer._parameters  # by name, torch looks each of them up slowly
    its: Any = router._parameters
    if (
        not 0 < shape[0] <= FEW
        or not x.is_cpu
        or len(own) != 4  # someone put a parametrisation on them
        or len(its) != 2
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or _is_tracing()
    ):
        return None
    weight, bias, scales, shifts = own.values()
    router_weight, router_bias = its.values()
    if x.dtype != scales.dtype:
        return None
    tokens = x if len(shape) == 3 else x.reshape(shape[0], -1, shape[-1])
    # Contiguous as in `fused`, so that sums are the same to the last bit, and so are the choices.
    tokens = tokens.contiguous()
    p = torch.softmax(F.linear(tokens.mean(1), router_weight, router_bias), -1)
    experts = []
    for row in p.tolist():
        best = max(row)
        if row.count(best) > 1 or best != best:
            return None
        experts.append(row.index(best))
    first, count = experts[0], len(experts)
    sums = kept.get(weight, bias, scales, shifts)
    if count == 1 or experts.count(first) == count:
        gamma, beta, index = sums.each[first]
        y = torch.layer_norm(tokens, gamma.shape, gamma, beta, eps)
        if count > 1:
            index = index.expand(count, 1)
    else:
        chosen = torch.tensor(experts)
        y = torch.layer_norm(tokens, sums.plain[0].shape, *sums.plain, eps)
        gamma, beta = sums.gamma.index_select(0, chosen), sums.beta.index_select(0, chosen)
        torch.addcmul(beta, y, gamma, out=y)
        index = chosen.unsqueeze(1)
    return y if len(shape) == 3 else y.view(shape), p, index
