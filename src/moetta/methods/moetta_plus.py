"""MoETTA+: experts and centres by style, and a loss that keeps every class alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import positive, require, share
from moetta.core.functional import entropy, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import SGDConfig
from moetta.core.objective import Step
from moetta.methods.registry import Drawn, register
from moetta.nn.centres import CentredHead
from moetta.nn.head import find_head
from moetta.nn.leash import Leash
from moetta.nn.moe import shared_gradients, with_experts
from moetta.nn.norms import find_norms
from moetta.nn.styles import Styles

FULL_BATCH = 64  # images that rate and pull are meant for; a smaller batch takes a smaller step


@dataclass(frozen=True)
class MoETTAPlusConfig(SGDConfig):
    """MoETTA+: MoETTA's experts and its choice of samples, with other routing and three additions.

    Each image has a *style*: the mean and spread of its early activations, clustered as the stream
    goes by. Corruptions differ in style and classes barely do, so a style represents a domain.

    1. *Experts by style.* In every norm layer from the style layer on, an image is served by the
       expert of its style. No router has to be learnt and no load balanced.
    2. *Centres by style.* The running mean feature of an image's style is subtracted before the
       classifier. This needs no gradient and cannot run away.
    3. *Diversity.* Single predictions should be certain, but recent predictions together should be
       spread over the classes, in all styles together and in each one. Entropy alone collapses
       where this does not.
    4. *Leash.* No expert moves further than a stride per step, or than a radius in all; the nearer
       it is to the radius, the less it still learns, and it gives back a small share of its offset
       after each step. This holds at any rate and over any stream.

    Attributes:
        seed: seed of the first style centres.
        lr: learning rate of the experts, for batches of 64 images. Where it is too high, the
            stride takes over.
        styles: number of styles, and of experts in each layer.
        style_layer: index of the norm layer whose input shows the style. Early layers do; late ones
            show the class. None is an eighth of the way in, but never the first. Layers before it
            are left alone, so that learning cannot move the styles.
        style_warmup: images to collect before the first clusters are formed.
        style_memory: how many images a cluster's centre remembers.
        shrink: how many images the overall mean counts for when mixed into the mean of each style.
        balanced: make the centres as if all classes had been seen equally often. Otherwise traffic
            sorted by class would have its class centred away.
        shared: share of all experts' gradients that each expert follows besides its own.
        e0: reference of the weight exp(e0 - H), in nats. It does not grow with the number of
            classes, so that a rate means the same step for 10 classes and for 1000.
        diversity: weight of the diversity term.
        horizon: how many images the average predictions remember, over all styles.
        pull: share of its offset that every expert gives back per 64 images.
        radius: largest norm of an expert's offsets over all layers, as a share of the norm of the
            layers' own scales; 0 sets no limit.
        stride: how far an expert may move per 64 images, as a share of the same norm; 0 sets no
            limit.
    """

    lr: float = 3e-2
    styles: int = 8
    style_layer: int | None = None
    style_warmup: int = 256
    style_memory: int = 1000
    shrink: float = 64.0
    balanced: bool = True
    shared: float = 0.2
    e0: float = 1.0
    diversity: float = 1.0
    horizon: int = 6400
    pull: float = 0.003
    radius: float = 0.03
    stride: float = 3e-4

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "styles", "style_warmup", "style_memory", "shrink", "e0", "horizon")
        share(self, "pull", "shared")
        for name in ("diversity", "radius", "stride"):
            value = getattr(self, name)
            require(value >= 0, f"{name} must be at least 0, got {value}")
        require(
            self.style_layer is None or self.style_layer >= 0,
            f"style_layer must be at least 0, got {self.style_layer}",
        )
        require(
            self.style_warmup >= self.styles,
            f"style_warmup must be at least styles={self.styles}, got {self.style_warmup}",
        )


@register(
    "moetta_plus",
    MoETTAPlusConfig,
    title="MoETTA+",
    summary="experts and centres by style, kept diverse and near the source model",
    group="experts",
    drawn=Drawn("#b45309", "#fbbf24", "d"),
    needs="a linear classifier",
    cost="1 forward, 1 backward",
)
class MoETTAPlus(Adapter[MoETTAPlusConfig]):
    """Experts and centres by style, with a diversity term and a leash."""

    over_ranks = True

    def build(self, source: Source) -> None:
        """Add the styles, the experts and the centred classifier."""
        config, norms = self.config, find_norms(self.network)
        index = max(1, len(norms) // 8) if config.style_layer is None else config.style_layer
        index = min(index, len(norms) - 1)
        found = find_head(self.network)
        name, head = found.name, found.module
        self.styles = Styles(
            norms[index],
            self.running,
            count=config.styles,
            warmup=config.style_warmup,
            memory=config.style_memory,
            seed=config.seed,
        )
        trained: list[tuple[str, nn.Parameter]] = []
        for norm in norms[index:]:
            layer: Any = with_experts(
                norm,
                config.styles,
                leader=self.styles,  # it has a routing, which is all that followers need
                router_grad=False,
            )
            trained += [
                (f"{norm.name}.expert_weight", layer.expert_weight),
                (f"{norm.name}.expert_bias", layer.expert_bias),
            ]
            if norm is norms[index]:
                self.styles.inner, layer = layer, self.styles
            self.surgery.replace(norm.name, layer)
        self.head = CentredHead(
            head, self.styles, self.running, shrink=config.shrink, balanced=config.balanced
        )
        self.surgery.replace(name, self.head)
        self.optimizer = config.sgd(self.make_trainable(trained))
        weights = [norm.module.get_parameter("weight") for norm in norms[index:]]
        scales = [weight.detach().float().square().sum() for weight in weights]
        scale = torch.stack(scales).sum().sqrt()
        self._leash = Leash(scale, config.radius, config.stride, config.pull)
        options: dict[str, Any] = {"device": self.device, "dtype": torch.float32}
        self.running |= {
            "entropy": torch.zeros((), **options),
            "batches": torch.zeros((), **options),
            "marginal": torch.full((head.out_features,), 1 / head.out_features, **options),
            "style_marginal": torch.full(
                (config.styles, head.out_features), 1 / head.out_features, **options
            ),
        }

    @property
    def activated_parameters(self) -> int:
        """One expert of each layer."""
        return super().activated_parameters // self.config.styles

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Each sample's style in the last prediction [B, 1]."""
        last = self.styles.last
        return {} if last is None else self.whole({"style": last.experts})

    def experts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Offsets of scale and shift of every style, [E, D] each, by layer."""
        names = [n.removesuffix(".expert_weight") for n in self.trained if n.endswith("_weight")]
        return {
            name: (self.trained[f"{name}.expert_weight"], self.trained[f"{name}.expert_bias"])
            for name in names
        }

    def expert_counts(self) -> dict[str, int]:
        """All layers follow one choice."""
        return {"style": self.config.styles}

    def learn(self, inputs: Inputs) -> Step:
        """One step down the loss; the means that this batch is centred by include it."""
        self.styles.learning = self.head.learning = True
        try:
            return self._step(inputs)
        finally:
            self.styles.learning = self.head.learning = False

    def _step(self, inputs: Inputs) -> Step:
        config, running = self.config, dict[str, Any](self.running)
        logits = inputs.logits(self.model)
        self.predicted(logits)
        running |= self.styles.pending | self.head.pending
        entropies = entropy(logits)
        running["batches"] = running["batches"] + 1
        now = entropies.detach().mean()
        running["entropy"] = running["entropy"] + (now - running["entropy"]) / running["batches"]
        selected = entropies.detach() <= running["entropy"]
        weight = reliability(entropies, config.e0)
        losses = {"entropy": masked_mean(weight * entropies, selected)}
        p = logits.float().softmax(-1)
        running |= self._marginals(p.detach())
        typical = (running["marginal"] + running["style_marginal"]) / 2
        losses["diversity"] = config.diversity * diversity(p, self.styles.whole @ typical)
        portion = min(1.0, len(inputs) / FULL_BATCH)
        total = portion * torch.stack([*losses.values()]).sum()
        # Early activations may overflow where the logits do not.
        sound = all(bool(torch.isfinite(value).all()) for value in running.values())
        grads = self.gradients(total) if sound else None
        if grads is not None:
            self._move(grads, portion)
            self.running |= running
        return Step(
            logits,
            forwards=len(inputs),
            backwards=0 if grads is None else len(inputs),
            entropy=entropies,
            selected=selected,
            losses=losses,
            routing=self.routing(len(inputs)),
            skipped="non-finite loss or gradient" if grads is None else None,
        )

    def _marginals(self, p: Tensor) -> dict[str, Tensor]:
        """The average prediction of all images, and of each style's, with these."""
        running, one = dict[str, Any](self.running), self.styles.whole
        horizon = self.config.horizon
        count = one.sum(0)[:, None]
        means = one.T @ p / count.clamp(min=1)
        fresh = (count * self.config.styles / horizon).clamp(max=1)
        return {
            "marginal": running["marginal"].lerp(p.mean(0), min(1.0, len(p) / horizon)),
            "style_marginal": running["style_marginal"].lerp(means, fresh),
        }

    def _move(self, grads: list[Tensor], portion: float) -> None:
        """One step of the experts, on their leash."""
        offsets = [*self.trained.values()]
        before = [offset.detach().clone() for offset in offsets]
        grads = shared_gradients(dict(zip(self.trained, grads, strict=True)), self.config.shared)
        self.step_along(self._leash.braked(offsets, grads))
        self._leash.hold(offsets, before, portion)


def diversity(probabilities: Tensor, marginal: Tensor) -> Tensor:
    """The term against frequent classes, given each sample's average prediction m, a constant.

    The entropy of m has the gradient -log m, up to a constant, for each prediction p in it: the
    term is the mean of p · log m. One batch shows few of many classes, so m is a running average.
    """
    logs = (marginal + 1e-8).log()
    return (probabilities * (logs - logs.mean(-1, keepdim=True))).sum(-1).mean()
