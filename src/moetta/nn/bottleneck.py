"""BECoTTA's mixture of bottleneck adapters after a block, with a noisy top-k gate per sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.nn import ranks
from moetta.nn.blocks import Block


@torch.library.custom_op("moetta::gate_noise", mutates_args=())
def gate_noise(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Standard normal noise in the shape of ``like``; it depends only on (seed, stream).

    A forward pass that gradient checkpointing repeats gets the same noise, and a compiled model
    treats it as one operation.
    """
    generator = torch.Generator(like.device).manual_seed((int(seed) + stream) % (1 << 63))
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)


@gate_noise.register_fake
def _(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    return torch.empty(like.shape, device=like.device, dtype=torch.float32)


def _noise(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """`gate_noise` for these rows of the whole batch."""
    share = ranks.current()
    if share is None:
        return gate_noise(like, seed, stream)

    def whole(shape: tuple[int, ...]) -> Tensor:
        return gate_noise(like.new_empty(shape), seed, stream)

    return ranks.draw(whole, like.shape, share)


class BottleneckMixture(nn.Module):
    """A block followed by small residual adapters, of which each sample uses a few.

    ``x <- block(x); x <- x + sum_e g_e up_e(gelu(down_e(x)))``, where g is non-zero for the
    ``top_k`` experts that the gate prefers for the sample.

    Attributes:
        gates: [routers, D, 2E]: from a token to its preferences and how noisy they are.
        down, down_bias, up, up_bias: the experts, [E, D, r], [E, r], [E, r, D], [E, D].
        noisy: False removes all randomness: no noise, and the mean of several gates.
        chosen: experts of the last batch's samples [B, k], best first.
    """

    chosen: Tensor | None

    def __init__(
        self,
        block: Block,
        experts: int,
        rank: int,
        top_k: int,
        routers: int,
        index: int,
        seed: Tensor,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.width, self.convolutional = block.width, block.convolutional
        self.experts, self.top_k, self.routers = experts, top_k, routers
        self.index, self.seed, self.noisy = index, seed, True
        self.chosen = None
        like = next(block.module.parameters())

        def draw(*shape: int) -> nn.Parameter:
            # On the CPU, so that a seed gives the same start on every device.
            value = nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator)
            return nn.Parameter(value.to(like.device, like.dtype))

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=like.device, dtype=like.dtype))

        self.gates = draw(routers, self.width, 2 * experts)
        self.down, self.down_bias = draw(experts, self.width, rank), zeros(experts, rank)
        self.up, self.up_bias = draw(experts, rank, self.width), zeros(experts, self.width)
        self.block = block.module  # last: torch rejects names that __getattr__ finds in it

    def __getattr__(self, name: str) -> Any:
        """The block's attribute: some networks read parts of their blocks (`layer.self_attn`)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Copying and loading ask for special methods, even before the block is set.
            if name == "block" or name.startswith("__"):
                raise
            return getattr(self.block, name)

    @property
    def activated_parameters(self) -> int:
        """What one sample uses: one gate and its experts."""
        experts = (self.down, self.down_bias, self.up, self.up_bias)
        each = sum(p.numel() for p in experts) // self.experts
        return self.gates.numel() // self.routers + self.top_k * each

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, adapted; if there are several, only the first is."""
        out = self.block(*args, **kwargs)
        if isinstance(out, tuple):
            return (self._adapt(out[0]), *out[1:])
        return self._adapt(out)

    def _adapt(self, x: Tensor) -> Tensor:
        axis = self._feature_axis(x)
        tokens = x.movedim(axis, -1)
        adapted = self._mixture(tokens.flatten(1, -2)).reshape(tokens.shape)
        return x + adapted.movedim(-1, axis).to(x.dtype)

    def _feature_axis(self, x: Tensor) -> int:
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError(f"a block returned {type(x).__name__}, not features of samples")
        # If both axes fit (a 64 x 64 map with 64 channels), the kind of block decides.
        axes = (1, -1) if self.convolutional else (-1, 1)
        for axis in axes:
            if x.shape[axis] == self.width:
                return axis
        raise ValueError(
            f"a block of {self.width} features returned a tensor of shape {tuple(x.shape)}"
        )

    def _mixture(self, x: Tensor) -> Tensor:
        """The chosen experts' sum [B, T, D], weighted by the gate."""
        # A single expert's weight is always 1, so there is nothing to differentiate.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.top_k > 1):
            values, chosen = self._scores(x).topk(self.top_k, dim=-1)
        self.chosen = chosen.detach()
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        weights = ((values - low) / (high - low + 1e-6)).softmax(-1)
        out = x.new_zeros(())
        for place in range(self.top_k):
            expert = chosen[:, place]
            hidden = F.gelu(x @ self.down[expert] + self.down_bias[expert][:, None])
            expanded = hidden @ self.up[expert] + self.up_bias[expert][:, None]
            out = out + weights[:, place, None, None] * expanded
        return out

    def _scores(self, x: Tensor) -> Tensor:
        """How much each sample wants each expert [B, E]."""
        if self.routers == 1 or not self.noisy:
            gates = self.gates.mean(0)
        else:
            draw = _noise(x.detach()[:, 0, 0], self.seed, 2 * self.index + 1)
            router = (torch.special.ndtr(draw) * self.routers).long().clamp(max=self.routers - 1)
            gates = self.gates[router]
        clean, raw = (x @ gates).float().chunk(2, dim=-1)
        if self.noisy:
            noise = _noise(clean.detach(), self.seed, 2 * self.index)
            clean = clean + noise * (F.softplus(raw) + 0.01)
        return clean.sum(1)
