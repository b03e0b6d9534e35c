"""MoETTA+: experts and centres by style, and a loss that keeps every class alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import positive, require, share
from moetta.core.functional import entropy, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import SGDConfig
from moetta.core.objective import Step
from moetta.methods.registry import Drawn, register
from moetta.nn import ranks
from moetta.nn.head import find_head
from moetta.nn.moe import Routing, with_experts
from moetta.nn.norms import Norm, find_norms

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
       spread over the classes. Entropy alone collapses where this does not.
    4. *Leash.* After each step the experts give back a small share of their offsets, and none moves
       further from the source model than a radius, at any rate and over any stream.

    Attributes:
        seed: seed of the first style centres.
        lr: learning rate of the experts, for batches of 64 images.
        styles: number of styles, and of experts in each layer.
        style_layer: index of the norm layer whose input shows the style. Early layers do; late ones
            show the class. None is an eighth of the way in, but never the first. Layers before it
            are left alone, so that learning cannot move the styles.
        style_warmup: images to collect before the first clusters are formed.
        style_memory: how many images a cluster's centre remembers.
        shrink: how many images the overall mean counts for when mixed into the mean of each style.
        shared: share of all experts' gradients that each expert follows besides its own.
        e0: reference of the weight exp(e0 - H), in nats. It does not grow with the number of
            classes, so that a rate means the same step for 10 classes and for 1000.
        diversity: weight of the diversity term.
        horizon: how many images the average prediction remembers.
        pull: share of its offset that every expert gives back per 64 images.
        radius: largest norm of an expert's offsets over all layers, as a share of the norm of the
            layers' own scales; 0 sets no limit.
    """

    lr: float = 1e-2
    styles: int = 8
    style_layer: int | None = None
    style_warmup: int = 256
    style_memory: int = 1000
    shrink: float = 64.0
    shared: float = 1.0
    e0: float = 1.0
    diversity: float = 1.0
    horizon: int = 6400
    pull: float = 0.01
    radius: float = 0.04

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "styles", "style_warmup", "style_memory", "shrink", "e0", "horizon")
        share(self, "pull", "shared")
        for name in ("diversity", "radius"):
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


class Styles(nn.Module):
    """Wraps an early norm layer and finds each sample's style, by clusters that follow the stream.

    A style is the mean and log spread, over tokens, of every channel. The first centres come from
    k-means over the first images; afterwards each centre is the running mean of its members.

    Attributes:
        inner: the norm layer.
        last: each sample's style in the last batch, as a routing that layers with experts follow.
        whole: the same for the whole batch, one-hot, where that is spread over several ranks.
        learning: count the batch in the running values.
        pending: the running values with that batch, for the adapter to keep.
    """

    inner: nn.Module

    def __init__(self, norm: Norm, config: MoETTAPlusConfig, running: dict[str, Any]) -> None:
        super().__init__()
        self.channels_first = norm.channels_first or norm.kind != "layer"
        self.config, self.running = config, running
        weight = norm.module.weight
        assert isinstance(weight, nn.Parameter)
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.float32}
        count, width = config.styles, 2 * weight.numel()
        running |= {
            "style_seen": torch.zeros((), **options),
            "style_mean": torch.zeros(width, **options),
            "style_var": torch.zeros(width, **options),
            "style_first": torch.zeros(config.style_warmup, width, **options),
            "style_centres": torch.zeros(count, width, **options),
            "style_members": torch.zeros(count, **options),
        }
        self.last: Routing | None = None
        self.whole = torch.zeros(0)
        self.learning = False
        self.pending: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Find the styles, then run the layer."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            styles = ranks.whole(self.describe(x.detach().float()))
            self.pending = self.advanced(styles) if self.learning else {}
            chosen = self.nearest(styles, self.running | self.pending)
            one = F.one_hot(chosen, self.config.styles).to(styles)
            if self.learning:
                self.pending |= self.moved(styles, one)
            self.whole = one
            self.last = Routing(ranks.held_of(one), ranks.held_of(chosen)[:, None])
        y: Tensor = self.inner(x)
        return y

    def describe(self, x: Tensor) -> Tensor:
        """[B, 2D]: mean and log spread over tokens or positions."""
        tokens = x.flatten(2).transpose(1, 2) if self.channels_first else x.flatten(1, -2)
        spread = tokens.var(1, unbiased=False).add(1e-12).sqrt()
        return torch.cat((tokens.mean(1), spread.log()), 1)

    def advanced(self, styles: Tensor) -> dict[str, Tensor]:
        """Mean and variance of all styles with these; the first centres, once there are enough."""
        r, size = self.running, len(styles)
        seen = r["style_seen"] + size
        portion = (size / seen).clamp(min=min(1.0, size / 10_000))
        mean = torch.where(r["style_seen"] == 0, styles.mean(0), r["style_mean"])
        var = r["style_var"] + portion * ((styles - mean).square().mean(0) - r["style_var"])
        mean = mean + portion * (styles.mean(0) - mean)
        new = {"style_seen": seen, "style_mean": mean, "style_var": var}
        room = slice(int(r["style_seen"]), min(int(seen), self.config.style_warmup))
        if room.start < room.stop:
            first = r["style_first"].clone()
            first[room] = styles[: room.stop - room.start]
            new["style_first"] = first
            if room.stop == len(first):
                scale = (var + 1e-6).sqrt()
                centres, members = k_means(first / scale, self.config.styles, self.config.seed)
                new |= {"style_centres": centres * scale, "style_members": members}
        return new

    @staticmethod
    def nearest(styles: Tensor, running: dict[str, Tensor]) -> Tensor:
        """The cluster of each sample [B]; all belong to the first before there are clusters."""
        scale = (running["style_var"] + 1e-6).sqrt()
        return torch.cdist(styles / scale, running["style_centres"] / scale).argmin(1)

    def moved(self, styles: Tensor, one: Tensor) -> dict[str, Tensor]:
        """The centres with these members."""
        now = self.running | self.pending
        centres, members, count = now["style_centres"], now["style_members"], one.sum(0)
        if not members.any():
            return {}
        members = members + count
        means = one.T @ styles / count.clamp(min=1)[:, None]
        centres = centres + (count / members.clamp(min=1))[:, None] * (means - centres)
        members = members.clamp(max=self.config.style_memory)
        return {"style_centres": centres, "style_members": members}


def k_means(x: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centres [K, S] and sizes [K] after k-means++ and ten rounds; drawn on the CPU from seed."""
    draw = torch.Generator().manual_seed(seed)
    centres = x[torch.randint(len(x), (1,), generator=draw)]
    while len(centres) < count:
        far = torch.cdist(x, centres).amin(1).square().cpu() + 1e-9
        centres = torch.cat((centres, x[torch.multinomial(far, 1, generator=draw)]))
    size = x.new_zeros(count)
    for _ in range(10):
        one = F.one_hot(torch.cdist(x, centres).argmin(1), count).to(x)
        size = one.sum(0)
        means = one.T @ x / size.clamp(min=1)[:, None]
        centres = torch.where(size[:, None] > 0, means, centres)
    return centres, size


class CentredHead(nn.Module):
    """The classifier, on features less the mean of their style.

    Attributes:
        inner: the linear layer.
        learning: count the batch in the means before they are subtracted.
        pending: the running values with that batch, for the adapter to keep.
    """

    def __init__(
        self, inner: nn.Linear, styles: Styles, shrink: float, running: dict[str, Any]
    ) -> None:
        super().__init__()
        self.inner, self.shrink, self.running = inner, shrink, running
        self._styles = [styles]  # a list hides it from torch's module tree: it is not a part
        options: dict[str, Any] = {"device": inner.weight.device, "dtype": torch.float32}
        count = styles.config.styles
        running["feature_count"] = torch.zeros(count, **options)
        running["feature_sum"] = torch.zeros(count, inner.in_features, **options)
        self.learning = False
        self.pending: dict[str, Tensor] = {}

    def forward(self, phi: Tensor) -> Tensor:
        """[B, D] to centred logits."""
        routing = self._styles[0].last
        if phi.dim() != 2 or routing is None or len(routing.experts) != len(phi):
            raise ValueError(
                "moetta_plus needs a classifier whose last linear layer sees one vector per "
                f"sample, after its early norm layers; here it sees {tuple(phi.shape)}"
            )
        logits = self.inner(phi)
        # The means need float32's digits.
        with torch.autocast(phi.device.type, enabled=False):
            count, total = self.running["feature_count"], self.running["feature_sum"]
            if self.learning:
                one = self._styles[0].whole
                count = count + one.sum(0)
                total = total + one.T @ ranks.whole(phi.detach().float())
                self.pending = {"feature_count": count, "feature_sum": total}
            overall = total.sum(0) / count.sum().clamp(min=1)
            means = (total + self.shrink * overall) / (count + self.shrink)[:, None]
            shift = F.linear(means, self.inner.weight.detach().float())
            centred: Tensor = logits.float() - shift[routing.experts[:, 0]]
            return centred


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
        self.styles = Styles(norms[index], config, self.running)
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
        self.head = CentredHead(head, self.styles, config.shrink, self.running)
        self.surgery.replace(name, self.head)
        self.optimizer = config.sgd(self.make_trainable(trained))
        weights = [norm.module.get_parameter("weight") for norm in norms[index:]]
        scales = [weight.detach().float().square().sum() for weight in weights]
        self._rim = config.radius * torch.stack(scales).sum().sqrt()
        options: dict[str, Any] = {"device": self.device, "dtype": torch.float32}
        self.running |= {
            "entropy": torch.zeros((), **options),
            "batches": torch.zeros((), **options),
            "marginal": torch.full((head.out_features,), 1 / head.out_features, **options),
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
        fresh = min(1.0, len(p) / config.horizon)
        running["marginal"] = running["marginal"].lerp(p.detach().mean(0), fresh)
        losses["diversity"] = config.diversity * diversity(p, running["marginal"])
        portion = min(1.0, len(inputs) / FULL_BATCH)
        total = portion * torch.stack([*losses.values()]).sum()
        # Early activations may overflow where the logits do not.
        sound = all(bool(torch.isfinite(value).all()) for value in running.values())
        grads = self.gradients(total) if sound else None
        if grads is not None:
            if config.shared:
                grads = [g + config.shared * g.sum(0, keepdim=True) for g in grads]
            self.step_along(grads)
            self._leash(portion)
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

    @torch.no_grad()
    def _leash(self, portion: float) -> None:
        """Pull the experts back a little, and those beyond the radius onto it."""
        offsets = [*self.trained.values()]
        keep = torch.full((self.config.styles, 1), 1 - self.config.pull * portion).to(offsets[0])
        if self.config.radius:
            far = torch.stack([offset.square().sum(1) for offset in offsets]).sum(0).sqrt()
            keep = keep.minimum((self._rim / far.clamp(min=1e-12))[:, None])
        for offset in offsets:
            offset.mul_(keep)


def diversity(probabilities: Tensor, marginal: Tensor) -> Tensor:
    """The term against frequent classes, given the average prediction m, a constant.

    The entropy of m has the gradient -log m, up to a constant, for each prediction p in it: the
    term is the mean of p log m. One batch shows few of many classes, so m is a running average.
    """
    logs = (marginal + 1e-8).log()
    return (probabilities @ (logs - logs.mean())).mean()
