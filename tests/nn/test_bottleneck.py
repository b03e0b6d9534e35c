from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.nn.blocks import Block
from moetta.nn.bottleneck import BottleneckMixture, gate_noise


class Pass(nn.Module):
    """A block that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def mixture(width: int = 6, convolutional: bool = False, **settings: int) -> BottleneckMixture:
    numbers = {"experts": 4, "rank": 2, "top_k": 1, "routers": 1, "index": 3, **settings}
    layer = BottleneckMixture(
        Block("x", Pass(), width, convolutional),
        seed=torch.tensor(11),
        generator=torch.Generator().manual_seed(0),
        **numbers,
    )
    with torch.no_grad():  # larger than the start, so that errors show
        for parameter in (layer.gates, layer.down, layer.down_bias, layer.up, layer.up_bias):
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return layer


def by_hand(layer: BottleneckMixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """One sample at a time, token by token, from the definition."""
    size, tokens, _ = x.shape
    experts, k = layer.experts, layer.top_k
    noise = gate_noise(torch.empty(size, tokens, experts), layer.seed, 2 * layer.index)
    out, chosen = x.clone(), []
    for i in range(size):
        score = torch.zeros(experts)
        for t in range(tokens):
            clean, raw = (x[i, t] @ layer.gates[0]).chunk(2)
            score = score + clean + noise[i, t] * (F.softplus(raw) + 0.01)
        best = score.argsort(descending=True)[:k]
        values = score[best]
        scaled = (values - values.min()) / (values.max() - values.min() + 1e-6)
        weights = scaled.exp() / scaled.exp().sum()
        for e, w in zip(best.tolist(), weights, strict=True):
            hidden = F.gelu(x[i] @ layer.down[e] + layer.down_bias[e])
            out[i] = out[i] + w * (hidden @ layer.up[e] + layer.up_bias[e])
        chosen.append(best)
    return out, torch.stack(chosen)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_mixture_is_what_the_definition_says(top_k: int):
    layer = mixture(top_k=top_k)
    x = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, chosen = by_hand(layer, x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert layer.chosen is not None
    assert torch.equal(layer.chosen, chosen)
    assert len(chosen[:, 0].unique()) > 1


@pytest.mark.parametrize("convolutional", [False, True])
def test_all_layouts_give_the_same(convolutional: bool):
    layer = mixture(convolutional=convolutional)
    maps = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(2))  # [B, H, W, D]
    with torch.no_grad():
        tokens = layer(maps.flatten(1, 2))
        assert torch.equal(layer(maps), tokens.view_as(maps))
        first = layer(maps.permute(0, 3, 1, 2))
        torch.testing.assert_close(first, tokens.view_as(maps).permute(0, 3, 1, 2))


def test_where_both_axes_fit_the_block_decides():
    x = torch.randn(2, 6, 6, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        last = mixture()(x)
        first = mixture(convolutional=True)(x)
        torch.testing.assert_close(first.permute(0, 2, 3, 1), mixture()(x.permute(0, 2, 3, 1)))
    assert not torch.allclose(first, last)


def test_a_tuple_keeps_its_other_parts():
    layer = mixture()
    x, rest = torch.randn(2, 3, 6), object()
    layer.block.forward = lambda x: (x, rest)  # type: ignore[method-assign]
    out = layer(x)
    assert out[1] is rest
    with torch.no_grad():
        torch.testing.assert_close(out[0], by_hand(layer, x)[0], rtol=1e-4, atol=1e-4)


def test_with_one_expert_a_sample_the_gate_gets_no_gradient_and_with_two_it_does():
    x = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(1))
    for top_k, learns in ((1, False), (2, True)):
        layer = mixture(top_k=top_k)
        layer(x).square().sum().backward()
        grad = layer.gates.grad
        assert (grad is not None and bool(grad.any())) == learns
        assert layer.down.grad is not None
        assert layer.down.grad.any()


def test_noise_is_a_function_of_seed_and_layer():
    like = torch.empty(200, 50)
    noise = gate_noise(like, torch.tensor(5), 0)
    assert torch.equal(noise, gate_noise(like, torch.tensor(5), 0))
    assert not torch.equal(noise, gate_noise(like, torch.tensor(6), 0))
    assert not torch.equal(noise, gate_noise(like, torch.tensor(5), 1))
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03


def test_several_routers_are_drawn_evenly_by_sample():
    layer = mixture(routers=3)
    with torch.no_grad():
        # Router r wants expert r, whatever the sample.
        layer.gates.zero_()
        for r in range(3):
            layer.gates[r, :, r] = 50
    with torch.no_grad():
        layer(torch.ones(300, 2, 6))
    assert layer.chosen is not None
    counts = torch.bincount(layer.chosen[:, 0], minlength=4)
    assert counts[3] == 0
    assert (counts[:3] > 70).all()


def test_without_noise_a_sample_decides_for_itself():
    layer = mixture(routers=2)
    layer.noisy = False
    x = torch.randn(6, 3, 6, generator=torch.Generator().manual_seed(4))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[order], layer(x[order]))


def test_features_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"6 features returned a tensor of shape \(2, 3, 5\)"):
        mixture()(torch.randn(2, 3, 5))


def test_what_is_no_tensor_of_features_is_refused():
    layer = mixture()
    layer.block = nn.Flatten(0)
    with pytest.raises(ValueError, match="a block returned Tensor, not features of samples"):
        layer(torch.randn(2, 3, 6))


def test_the_blocks_parts_are_found_through_the_mixture():
    layer = mixture()
    assert layer.scale is layer.block.scale
    assert copy.deepcopy(layer).scale is not layer.scale
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing


def test_the_start_is_small_and_seeded():
    def fresh(seed: int) -> BottleneckMixture:
        generator = torch.Generator().manual_seed(seed)
        return BottleneckMixture(
            Block("x", Pass(), 64, False), 6, 1, 1, 1, 0, torch.tensor(0), generator
        )

    layer = fresh(0)
    assert math.isclose(layer.gates.std().item(), 0.02, rel_tol=0.2)
    assert not layer.up_bias.any()
    assert torch.equal(layer.down, fresh(0).down)
    assert not torch.equal(layer.down, fresh(1).down)
    assert layer.activated_parameters == 64 * 12 + 64 * 2 + 1 + 64
