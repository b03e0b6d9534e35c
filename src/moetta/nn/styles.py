"""Styles: clusters of images whose early activations are alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.nn import ranks
from moetta.nn.moe import Routing
from moetta.nn.norms import Norm

MEMORY_OF_ALL = 10_000  # images that the mean and variance of all styles remember


class Styles(nn.Module):
    """Wraps an early norm layer and finds each sample's style, by clusters that follow the stream.

    A style is the mean and log spread, over tokens, of every channel. The first centres come from
    k-means over the first images; afterwards each centre is the running mean of its members.

    Args:
        norm: the layer.
        running: where the running values are kept.
        count: number of styles.
        warmup: images to collect before the first clusters are formed.
        memory: how many images a cluster's centre remembers.
        seed: seed of the first centres.

    Attributes:
        inner: the norm layer, to be set by whoever replaces it.
        last: each sample's style in the last batch, as a routing that layers with experts follow.
        whole: the same for the whole batch, one-hot, where that is spread over several ranks.
        learning: count the batch in the running values.
        pending: the running values with that batch, for the adapter to keep.
    """

    inner: nn.Module

    def __init__(
        self,
        norm: Norm,
        running: dict[str, Any],
        *,
        count: int,
        warmup: int,
        memory: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.channels_first = norm.channels_first or norm.kind != "layer"
        self.running, self.count = running, count
        self.warmup, self.memory, self.seed = warmup, memory, seed
        weight = norm.module.weight
        assert isinstance(weight, nn.Parameter)
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.float32}
        width = 2 * weight.numel()
        running |= {
            "style_seen": torch.zeros((), **options),
            "style_mean": torch.zeros(width, **options),
            "style_var": torch.zeros(width, **options),
            "style_first": torch.zeros(warmup, width, **options),
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
            one = F.one_hot(chosen, self.count).to(styles)
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
        portion = (size / seen).clamp(min=min(1.0, size / MEMORY_OF_ALL))
        mean = torch.where(r["style_seen"] == 0, styles.mean(0), r["style_mean"])
        var = r["style_var"] + portion * ((styles - mean).square().mean(0) - r["style_var"])
        mean = mean + portion * (styles.mean(0) - mean)
        new = {"style_seen": seen, "style_mean": mean, "style_var": var}
        room = slice(int(r["style_seen"]), min(int(seen), self.warmup))
        if room.start < room.stop:
            first = r["style_first"].clone()
            first[room] = styles[: room.stop - room.start]
            new["style_first"] = first
            scale = (var + 1e-6).sqrt()
            scaled = first / scale
            # A batch that is not finite will be skipped; it must not stop the stream here.
            if room.stop == len(first) and torch.isfinite(scaled).all():
                centres, members = k_means(scaled, self.count, self.seed)
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
        return {"style_centres": centres, "style_members": members.clamp(max=self.memory)}


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
