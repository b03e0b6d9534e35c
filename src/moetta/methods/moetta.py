"""MoETTA: every LayerNorm becomes a set of experts, one for each sample (Fan et al., 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import positive, require, share
from moetta.core.functional import UNCERTAINTIES, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import SGDConfig
from moetta.core.objective import Objective, Step
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.blocks import find_blocks
from moetta.nn.moe import MoENorm, Routing, balance_loss, shared_gradients, with_experts
from moetta.nn.norms import Norm, find_norms, parse_indices


@dataclass(frozen=True)
class MoETTAConfig(SGDConfig):
    """MoETTA. The defaults are the paper's for the classical stream.

    The preset "potpourri" has the paper's 11 experts and balance 0.5 for those streams; "released"
    follows the authors' code where it differs. The ablations of the paper's table 3 are ``select``,
    ``reweight``, ``balance=0``, ``router_grad``, ``routing``, ``moe`` and ``router_scope``.

    Attributes:
        seed: seed of the routers' initial weights.
        lr: learning rate of experts and routers.
        experts: experts in each layer.
        top_k: experts per sample.
        top_k_weights: for top_k > 1, weigh the experts by their share of probability, or each by 1.
        balance: weight of the load-balancing loss, relative to the average entropy (lambda).
        shared: share of all experts' gradients that each expert follows besides its own, so that
            experts do not each begin at zero; not in the paper.
        e0: reference of the weight exp(e0 - H), as a share of ln C.
        objective: the measure of uncertainty to minimise: the entropy of the prediction, or COME's
            entropy of an opinion ("come").
        frozen: norm layers left unchanged, by index, as in "0-5,8"; None is the paper's choice
            for the architecture (the first of a ViT-B, 0-14 of a ViT-L, a ConvNeXt's first ninth).
        plain: norm layers whose own scale and shift are trained, without experts.
        channels_first: count a ConvNeXt's channels-first LayerNorms (stem, downsampling and head)
            among the layers too; the paper leaves them unchanged.
        select: learn only from samples below the running average entropy.
        reweight: weigh samples by exp(e0 - H).
        router_grad: let the entropy loss reach the routers.
        routing: choose an expert for each sample, or one for the whole batch.
        batch_balance: with routing="batch", balance over the last choices ("window"), or keep the
            formula within the batch, where all share one expert and it is the constant 1.
        window: how many choices that window holds.
        moe: with False, the same layers are trained without experts.
        router_scope: a router in each layer, or one at the first whose choice all layers follow.
        threshold: the paper's running mean, or the drifting variant of the authors' code.
        batch_statistics: BatchNorm layers normalise by the batch, not by the source statistics.
    """

    later: ClassVar[tuple[str, ...]] = (*SGDConfig.later, "shared")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "released": {"threshold": "aliased", "batch_balance": "constant"},
        "potpourri": {"experts": 11, "balance": 0.5},
    }

    lr: float = 1e-3
    experts: int = 9
    top_k: int = 1
    top_k_weights: Literal["share", "one"] = "share"
    balance: float = 0.2
    shared: float = 0.0
    e0: float = 0.4
    objective: Literal["entropy", "come"] = "entropy"
    frozen: str | None = None
    plain: str = ""
    channels_first: bool = False
    select: bool = True
    reweight: bool = True
    router_grad: bool = True
    routing: Literal["sample", "batch"] = "sample"
    batch_balance: Literal["window", "constant"] = "window"
    window: int = 64
    moe: bool = True
    router_scope: Literal["layer", "model"] = "layer"
    threshold: Literal["mean", "aliased"] = "mean"
    batch_statistics: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "experts", "e0", "window")
        require(
            1 <= self.top_k <= self.experts,
            f"top_k must be between 1 and experts={self.experts}, got {self.top_k}",
        )
        require(self.balance >= 0, f"balance must be at least 0, got {self.balance}")
        share(self, "shared")


def indexed_norms(network: nn.Module, channels_first: bool = False) -> list[Norm]:
    """The norm layers as MoETTA counts them.

    Channels-first LayerNorms (ConvNeXt's stem, downsampling and head) are not counted and stay
    frozen, unless they are asked for or the model has no others.
    """
    norms = find_norms(network)
    return [norm for norm in norms if channels_first or not norm.channels_first] or norms


def default_frozen(network: nn.Module, count: int) -> set[int]:
    """The layers that the paper leaves alone: the first ones, by architecture."""
    if any(norm.channels_first for norm in find_norms(network)):  # ConvNeXt: 4 of ConvNeXt-B's 36
        return set(range(min(max(1, count // 9), count - 1)))
    return set(range(15 if is_vit_large(network) else min(1, count - 1)))


def is_vit_large(network: nn.Module) -> bool:
    """Whether the network is built like a ViT-L: 24 blocks in a row, with two LayerNorms each."""
    try:
        blocks = find_blocks(network)
    except ValueError:
        return False
    rows = {block.name.rpartition(".")[0] for block in blocks}
    kinds = [[norm.kind for norm in block.norms()] for block in blocks]
    return len(rows) == 1 and kinds == [["layer", "layer"]] * 24


@register(
    "moetta",
    MoETTAConfig,
    title="MoETTA",
    summary="gives every norm layer experts and routes each sample to one of them",
    group="experts",
    citation=Citation(
        "Fan, Xiao and Jiang, Jingyan and Chen, Zhaoru and Huang, Fanding and Chen, Xiao and "
        "Jiang, Qinting and Zhang, Bowen and Tang, Xing and Wang, Zhi",
        "MoETTA: Test-Time Adaptation Under Mixed Distribution Shifts with MoE-LayerNorm",
        "AAAI",
        2026,
    ),
    drawn=Drawn("#0b5cad", "#62aeff", "*"),
    preset_for=lambda stream: "potpourri" if "potpourri" in stream else "paper",
    cost="1 forward, at most 1 backward",
    paper_row=8,
)
class MoETTA(Adapter[MoETTAConfig]):
    """Experts and routers learn from the entropy of reliable samples, and to share the load."""

    over_ranks = True

    def build(self, source: Source) -> None:
        """Give the norm layers experts."""
        config = self.config
        norms = indexed_norms(self.network, config.channels_first)
        count = len(norms)
        frozen = (
            default_frozen(self.network, count)
            if config.frozen is None
            else parse_indices(config.frozen, count, "frozen")
        )
        plain = parse_indices(config.plain, count, "plain")
        if both := frozen & plain:
            raise ValueError(f"layers {sorted(both)} are in both frozen and plain; choose one")
        if not config.moe:
            plain = set(range(count)) - frozen
        if len(frozen) == count:
            raise ValueError(f"frozen={config.frozen!r} freezes all {count} norm layers")
        self.layers: dict[str, MoENorm] = {}
        trained: list[tuple[str, nn.Parameter]] = []
        generator = torch.Generator().manual_seed(config.seed)
        for index, norm in enumerate(norms):
            if index in plain:
                trained += norm.parameters()
            elif index not in frozen:
                trained += self._install(norm, generator)
        self.optimizer = config.sgd(self.make_trainable(trained))
        self.running |= {"threshold": None, "entropy": None, "batches": None}
        if self.layers and config.routing == "batch" and config.batch_balance == "window":
            self.running["choices"] = None

    def _install(
        self, norm: Norm, generator: torch.Generator
    ) -> Iterator[tuple[str, nn.Parameter]]:
        config = self.config
        leader = next(iter(self.layers.values()), None) if config.router_scope == "model" else None
        layer = with_experts(
            norm,
            config.experts,
            top_k=config.top_k,
            top_k_weights=config.top_k_weights,
            router_grad=config.router_grad,
            routing=config.routing,
            leader=leader,
            batch_statistics=config.batch_statistics,
            generator=generator,
        )
        self.surgery.replace(norm.name, layer)
        self.layers[norm.name] = layer
        for name, parameter in layer.named_parameters():
            if name not in ("weight", "bias"):
                yield f"{norm.name}.{name}", parameter

    @property
    def activated_parameters(self) -> int:
        """The chosen experts and the routers; all of the layers trained without experts."""
        every = sum(p.numel() for p in self.trained.values())
        idle = sum(
            (len(layer.expert_weight) - layer.top_k) * 2 * layer.expert_weight.shape[1]
            for layer in self.layers.values()
        )
        return every - idle

    def learn(self, inputs: Inputs) -> Step:
        """One step down the weighted entropy of reliable samples plus the balance loss.

        If no sample is reliable, only the balance loss and the momentum of earlier steps move
        anything; without balancing, nothing moves.
        """
        try:
            return super().learn(inputs)
        finally:
            # Only now: gradient checkpointing runs layers again in the backward pass, and followers
            # of a leading router read its choice then.
            self._clear()

    def objective(self, inputs: Inputs) -> Objective:
        """The weighted entropy of reliable samples, and how evenly the experts are used."""
        config = self.config
        logits = self.predict(inputs)
        routings = self._routings()
        entropies = UNCERTAINTIES[config.objective](logits)
        threshold, running = self._advance(entropies.detach().mean())
        selected = torch.ones_like(entropies, dtype=torch.bool)
        if config.select:
            selected = entropies.detach() <= threshold
        weight = reliability(entropies, config.e0 * log_classes(logits)) if config.reweight else 1.0
        losses = {"entropy": masked_mean(weight * entropies, selected)}
        if routings:
            total, choices = self._balance(list(routings.values()))
            losses["balance"] = config.balance * threshold * total
            if "choices" in self.running:
                running["choices"] = choices
        balanced = bool(routings and config.balance)
        if not balanced and not selected.any() and torch.isfinite(threshold):
            self.running.update(running)  # such a batch counts in the running averages too
        return Objective(logits, losses, selected, running=running, without_selection=balanced)

    def step_along(self, grads: list[Tensor]) -> None:
        """One optimiser step; experts may share a part of their gradients."""
        named = dict(zip(self.trained, grads, strict=True))
        super().step_along(shared_gradients(named, self.config.shared))

    def predict(self, inputs: Inputs) -> Tensor:
        """Predict without learning."""
        self._clear()  # a refused batch may have left its routing
        return super().predict(inputs)

    def experts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The experts' offsets of scale and shift, by layer."""
        return {
            name: (layer.expert_weight.detach(), layer.expert_bias.detach())
            for name, layer in self.layers.items()
        }

    def routing(self, samples: int) -> dict[str, Tensor]:
        """The experts of each sample in the last prediction [B, k], by layer."""
        found = self._routings()
        if self.share is not None:
            samples = self.share.total
        if self.config.routing == "batch":
            return {name: r.experts.expand(samples, -1) for name, r in found.items()}
        return {name: _by_sample(name, r.experts, samples) for name, r in found.items()}

    def merge(self) -> nn.Module:
        """A separate model that keeps experts and routers as they are."""
        with self.lock:
            self._clear()  # the graph of a call that bypassed the adapter cannot be copied
            return super().merge()

    def _routings(self) -> dict[str, Routing]:
        """What the forward pass left on the layers, of the whole batch."""
        last = {name: layer.last for name, layer in self.layers.items() if layer.last is not None}
        if self.share is None or self.config.routing == "batch":
            return last
        found = self.whole(
            {f"p {name}": r.probabilities for name, r in last.items()}
            | {f"experts {name}": r.experts for name, r in last.items()}
        )
        return {name: Routing(found[f"p {name}"], found[f"experts {name}"]) for name in last}

    def _clear(self) -> None:
        for layer in self.layers.values():
            layer.keep(None)

    def _advance(self, now: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Threshold and running values with one more batch, whose mean entropy is ``now``.

        The paper's recursions for threshold and balance weight telescope to the running mean. The
        released code scales its first entropy in place as if it were the threshold.
        """
        before, mean, batches = (self.running[k] for k in ("threshold", "entropy", "batches"))
        if before is None or mean is None or batches is None:
            zero = torch.zeros_like(now)
            start = now if self.config.threshold == "mean" else zero
            return now, {"threshold": now, "entropy": start, "batches": zero + 1}
        count = batches + 1
        if self.config.threshold == "mean":
            mean = mean + (now - mean) / count
            threshold = mean
        else:  # "entropy" holds the sum of all but the first batch
            old = (before + mean) / batches
            mean = mean + now
            average = (before + mean) / count
            # Only sure batches so far: there is no ratio to scale by.
            threshold = torch.where(old == 0, average, before * average / old)
        return threshold, {"threshold": threshold, "entropy": mean, "batches": count}

    def _balance(self, routings: list[Routing]) -> tuple[Tensor, Tensor | None]:
        """Sum of the layers' balance losses, and the window of batch choices if one is kept."""
        if self.config.router_scope == "model":
            routings = routings[:1]  # one router, one term
        if self.config.routing == "batch" and self.config.batch_balance == "constant":
            return torch.full((), float(len(routings)), device=self.device), None
        if "choices" not in self.running:
            return _balance_of_all(routings), None
        now = torch.stack([routing.experts for routing in routings])  # [M, 1, k]
        past = self.running["choices"]
        if past is None:  # -1: no choice yet
            past = now.new_full((len(now), self.config.window, now.shape[2]), -1)
        choices = torch.cat((past[:, 1:], now), 1)
        made = choices[:, choices[0, :, 0] >= 0]  # all layers chose equally often
        recent = [
            Routing(r.probabilities, window) for r, window in zip(routings, made, strict=True)
        ]
        return _balance_of_all(recent), choices


def _by_sample(name: str, experts: Tensor, samples: int) -> Tensor:
    """[B, k]; for a layer that sees each sample as w windows, [B, w k]."""
    if len(experts) == samples:
        return experts
    if len(experts) % samples:
        raise ValueError(
            f"the norm layer {name!r} got {len(experts)} rows for {samples} samples: its first "
            "axis is not the batch, so it cannot route samples; leave it out with frozen=, or use "
            "a model whose tokens are [B, T, D] (batch_first=True)"
        )
    return experts.reshape(samples, -1)


def _balance_of_all(routings: list[Routing]) -> Tensor:
    """Sum of the layers' balance losses, computed per batch size."""
    alike: dict[int, list[Routing]] = {}
    for routing in routings:  # a model may fold windows into the batch of some layers
        alike.setdefault(len(routing.probabilities), []).append(routing)
    terms = [
        balance_loss(
            Routing(
                torch.stack([routing.probabilities for routing in group]),
                torch.stack([routing.experts for routing in group]),
            )
        )
        for group in alike.values()
    ]
    return torch.cat(terms).sum()
