"""Norm layers with experts: a router picks an offset of scale and shift for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetta.nn import few, fused, ranks
from moetta.nn.norms import Norm, normalise, trailing_activation

_skip_init: Any = nn.utils.skip_init  # torch gives it no types


@dataclass(frozen=True)
class Routing:
    """Where a batch went in one layer.

    Attributes:
        probabilities: the router's softmax [B, E] (one row if the whole batch is routed together),
            with its graph.
        experts: the chosen ones [B, k], or [1, k].
    """

    probabilities: Tensor
    experts: Tensor


def balance_loss(routing: Routing) -> Tensor:
    """E sum_e F_e P_e: share of the batch that went to e, times e's mean probability.

    Leading axes are kept: M layers' routings stacked, [M, B, E] and [M, B, k], give [M].
    It is 1 for a uniform router. The paper's claim that it cannot be less is false:

    >>> p = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.0, 1.0]])
    >>> round(balance_loss(Routing(p, p.argmax(1, keepdim=True))).item(), 4)
    0.8933
    """
    p, chosen = routing.probabilities, routing.experts.flatten(-2)
    count = torch.zeros_like(p[..., 0, :]).scatter_add_(-1, chosen, p.new_ones(chosen.shape))
    return (count * p.mean(-2)).sum(-1) * (p.shape[-1] / chosen.shape[-1])


def shared_gradients(grads: Mapping[str, Tensor], share: float) -> list[Tensor]:
    """Gradients by which every expert also follows a share of the sum of all experts' gradients.

    Experts that start alike then begin as one offset that all samples train, and part as each
    follows its own samples besides.

    Args:
        grads: by name; those of experts, [E, D], end in ``expert_weight`` or ``expert_bias``.
        share: how much of the sum to follow; 0 changes nothing.
    """
    ends = ("expert_weight", "expert_bias")
    return [
        g + share * g.sum(0, keepdim=True) if share and name.endswith(ends) else g
        for name, g in grads.items()
    ]


class MoENorm(nn.Module):
    """What all norm layers with experts share: parameters and routing.

    Attributes:
        weight: frozen scale of the pre-trained layer, the shared expert [D].
        bias: its frozen shift [D].
        expert_weight: offsets of the scale, one row per expert [E, D], zero at the start.
        expert_bias: offsets of the shift [E, D].
        router: from the mean token [B, D] to one logit per expert.
        last: the routing of the last forward pass, for the adapter to collect.
    """

    def __init__(
        self,
        norm: Norm,
        experts: int,
        *,
        top_k: int = 1,
        top_k_weights: Literal["share", "one"] = "share",
        router_grad: bool = True,
        routing: Literal["sample", "batch"] = "sample",
        leader: MoENorm | None = None,
        batch_statistics: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        weight = norm.module.weight
        bias = getattr(norm.module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.bias = bias if bias is not None else nn.Parameter(torch.zeros_like(weight), False)
        # Offsets and router keep at least float32: a learning step is lost in half precision.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        options: dict[str, Any] = {"device": weight.device, "dtype": dtype}
        self.expert_weight = nn.Parameter(torch.zeros(experts, weight.numel(), **options))
        self.expert_bias = nn.Parameter(torch.zeros(experts, weight.numel(), **options))
        self.router: nn.Linear | None = None
        if leader is None:
            router: nn.Linear = _skip_init(nn.Linear, weight.numel(), experts, **options)
            with torch.no_grad():  # drawn on the CPU: the same start on every device
                draw = torch.empty(router.weight.shape, dtype=dtype)
                router.weight.copy_(nn.init.xavier_normal_(draw, generator=generator))
                router.bias.zero_()
            self.router = router
        self.top_k, self.unit_weights = top_k, top_k_weights == "one"
        self.router_grad, self.batch_routing = router_grad, routing == "batch"
        # A list hides the leader from torch's module tree: it is not part of this layer.
        self._leader = [] if leader is None else [leader]
        self.batch_statistics = batch_statistics
        self.eps: float = norm.module.eps  # type: ignore[assignment]
        self.channels_first = norm.channels_first
        self.tail = trailing_activation(norm.module)
        self.has_tail = not isinstance(self.tail, nn.Identity)
        self._routes_samples = leader is None and not self.batch_routing
        self.last: Routing | None = None
        self._sums = few.ExpertSums()

    def keep(self, routing: Routing | None) -> None:
        """Set ``last``; nn.Module's own way, which looks for parameters, takes far longer."""
        self.__dict__["last"] = routing

    def route(self, token_mean: Tensor) -> Routing:
        """Choose experts for mean tokens [B, D]; a follower repeats its leader's choice."""
        if self._leader:
            routing = self._leader[0].last
            if routing is None:
                raise ValueError(
                    "the first norm layer, whose router all layers follow, has not run yet: this "
                    'model calls its layers in another order; use router_scope="layer"'
                )
            return routing
        assert self.router is not None
        with torch.autocast(token_mean.device.type, enabled=False):
            logits = self.router(token_mean.to(self.router.weight.dtype))
            if self.batch_routing:
                logits = _batch_mean(logits)
            p = logits.softmax(-1)
        return Routing(p, p.topk(self.top_k, dim=-1).indices)

    def affine(self, routing: Routing, batch: int) -> tuple[Tensor, Tensor]:
        """Each sample's own scale and shift [B, D]."""
        chosen = routing.probabilities.gather(1, routing.experts)
        constant = chosen.detach()
        c = chosen / (constant if self.unit_weights else constant.sum(-1, keepdim=True))
        c = (c if self.router_grad else c.detach()).unsqueeze(-1)
        if len(c) not in (1, batch):
            raise ValueError(
                f"a layer of {batch} rows cannot follow the router of one with {len(c)}; use "
                'router_scope="layer"'
            )
        gamma = self.weight + (c * self.expert_weight[routing.experts]).sum(1)
        beta = self.bias + (c * self.expert_bias[routing.experts]).sum(1)
        return gamma.expand(batch, -1), beta.expand(batch, -1)

    def extra_repr(self) -> str:
        """Size and routing, for printing."""
        experts, width = self.expert_weight.shape
        return f"{width}, experts={experts}, top_k={self.top_k}"


class MoELayerNorm(MoENorm):
    """LayerNorm with experts, on [B, D], [B, T, D], [B, H, W, D] or channels-first [B, D, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """Route each sample, normalise each token."""
        if self.channels_first:
            x = x.permute(0, 2, 3, 1)
        if self._routes_samples:
            quick = None
            if self.top_k == 1 and not torch.is_grad_enabled():
                router: Any = self._modules["router"]
                quick = few.moe_layer_norm_of_few(x, self, router, self._sums, self.eps)
            y, p, experts = self._fused(x) if quick is None else quick
            self.keep(Routing(p, experts))
        else:
            last = self.route(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)
            self.keep(last)
            gamma, beta = self.affine(last, len(x))
            y = fused.sample_affine_layer_norm(x, gamma, beta, self.eps)
        if self.channels_first:
            y = y.permute(0, 3, 1, 2)
        out: Tensor = self.tail(y) if self.has_tail else y
        return out

    def _fused(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.router is not None
        return fused.moe_layer_norm(
            x, self.weight, self.bias, self.expert_weight, self.expert_bias,
            self.router.weight, self.router.bias,
            self.eps, self.top_k, self.unit_weights, self.router_grad,
        )  # fmt: skip


class MoEChannelNorm(MoENorm):
    """GroupNorm or BatchNorm with experts for the scale and shift, on [B, D, ...].

    A BatchNorm keeps its source statistics unless ``batch_statistics``: a sample's result then does
    not depend on the rest of its batch, which may come from other domains.
    """

    def __init__(self, norm: Norm, experts: int, **options: Any) -> None:
        super().__init__(norm, experts, **options)
        self.norm = norm.module

    def forward(self, x: Tensor) -> Tensor:
        """Route each sample by its mean over space, normalise, scale and shift."""
        self.last = self.route(x.flatten(2).mean(2) if x.dim() > 2 else x)
        gamma, beta = self.affine(self.last, len(x))
        shape = (*gamma.shape, *(1,) * (x.dim() - 2))
        plain = normalise(self.norm, x, self.batch_statistics)
        y: Tensor = self.tail(torch.addcmul(beta.view(shape), plain, gamma.view(shape)).to(x.dtype))
        return y


def _batch_mean(rows: Tensor) -> Tensor:
    """The mean row of the whole batch [1, D]."""
    share = ranks.current()
    if share is None:
        return rows.mean(0, keepdim=True)
    count = len(rows) // share.held * share.total
    return share.sum(share.real(rows).sum(0, keepdim=True)) / count


def with_experts(norm: Norm, experts: int, **options: Any) -> MoENorm:
    """The layer with experts that replaces a norm layer."""
    kind = MoELayerNorm if norm.kind == "layer" else MoEChannelNorm
    return kind(norm, experts, **options)
