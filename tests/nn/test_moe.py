"""Norm layers with experts: layouts, routing, the balance loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d, LayerNorm2d
from torch import nn

from moetta.nn.moe import MoELayerNorm, Routing, balance_loss, with_experts
from moetta.nn.norms import describe


def layer(module, experts=3, **options):
    torch.manual_seed(0)
    made = with_experts(describe("norm", module), experts, **options)
    nn.init.normal_(made.expert_weight)
    nn.init.normal_(made.expert_bias)
    return made


def by_hand(module, made, x, plain):
    """Each sample alone: route by its mean token, then normalise with its expert's parameters."""
    channels_last = isinstance(module, nn.LayerNorm) and not isinstance(module, LayerNorm2d)
    out = []
    for sample in x:
        axes = tuple(range(sample.dim() - 1)) if channels_last else tuple(range(1, sample.dim()))
        token = sample.mean(axes) if axes else sample
        k = made.router(token).argmax()
        gamma, beta = made.weight + made.expert_weight[k], made.bias + made.expert_bias[k]
        out.append(plain(sample[None], gamma, beta)[0])
    return torch.stack(out)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(8), (5, 8)),
        (nn.LayerNorm(8), (5, 7, 8)),
        (nn.LayerNorm(8, bias=False), (5, 4, 3, 8)),
        (LayerNorm2d(8), (5, 8, 4, 3)),
        (nn.GroupNorm(2, 8), (5, 8, 4, 3)),
        (nn.BatchNorm2d(8).eval(), (5, 8, 4, 3)),
        (BatchNormAct2d(8).eval(), (5, 8, 4, 3)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(len(v)),
)
def test_every_layout_routes_by_sample(module, shape):
    nn.init.normal_(module.weight)
    made = layer(module)
    torch.manual_seed(1)
    x = torch.randn(shape)

    def plain(sample, gamma, beta):
        if isinstance(module, LayerNorm2d):
            moved = nn.functional.layer_norm(
                sample.permute(0, 2, 3, 1), (8,), gamma, beta, module.eps
            )
            return moved.permute(0, 3, 1, 2)
        if isinstance(module, nn.LayerNorm):
            return nn.functional.layer_norm(sample, (8,), gamma, beta, module.eps)
        if isinstance(module, nn.GroupNorm):
            return nn.functional.group_norm(sample, 2, gamma, beta, module.eps)
        y = nn.functional.batch_norm(
            sample, module.running_mean, module.running_var, gamma, beta, eps=module.eps
        )
        return y.relu() if isinstance(module, BatchNormAct2d) else y

    torch.testing.assert_close(made(x), by_hand(module, made, x, plain), atol=1e-5, rtol=1e-4)
    assert made.last.experts.shape == (5, 1)
    assert len(made.last.experts.unique()) > 1, "the test needs more than one expert in use"


def test_batch_statistics_are_an_option():
    norm = nn.BatchNorm2d(8).eval()
    x = torch.randn(5, 8, 4, 3) * 3 + 2
    made = with_experts(describe("norm", norm), 3, batch_statistics=True)
    expected = nn.functional.batch_norm(x, None, None, training=True, eps=norm.eps)
    torch.testing.assert_close(made(x), expected)


def test_top_k_weights():
    for weights, total in (("share", 1.0), ("one", 2.0)):
        made = layer(nn.LayerNorm(8), top_k=2, top_k_weights=weights)
        nn.init.ones_(made.expert_weight)
        gamma, _ = made.affine(made.route(torch.randn(4, 8)), 4)
        torch.testing.assert_close(gamma, torch.full((4, 8), 1 + total))


def test_batch_routing_uses_one_expert():
    made = layer(nn.LayerNorm(8), routing="batch")
    made(torch.randn(6, 5, 8))
    assert made.last.experts.shape == (1, 1)


def test_router_starts_xavier_normal_with_zero_bias():
    made = with_experts(
        describe("n", nn.LayerNorm(512)), 16, generator=torch.Generator().manual_seed(0)
    )
    assert abs(made.router.weight.std().item() - (2 / (512 + 16)) ** 0.5) < 2e-3
    assert made.router.bias.abs().max() == 0
    assert made.expert_weight.abs().max() == 0
    assert made.expert_bias.abs().max() == 0


def test_follower_repeats_its_leader():
    leader = layer(nn.LayerNorm(8))
    follower = MoELayerNorm(describe("f", nn.LayerNorm(6)), 3, leader=leader)
    leader(torch.randn(5, 2, 8))
    follower(torch.randn(5, 2, 6))
    assert torch.equal(follower.last.experts, leader.last.experts)
    assert follower.router is None
    assert not any("leader" in name for name, _ in follower.named_parameters())


def definition(p, experts):
    """E sum_e F_e P_e, spelt out."""
    batch, e = p.shape
    total = 0.0
    for expert in range(e):
        f = sum(1 for i in range(len(experts)) if experts[i] == expert) / len(experts)
        total += f * sum(p[i, expert].item() for i in range(batch)) / batch
    return e * total


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_balance_loss_is_its_definition(batch, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(batch, experts, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    chosen = p.argmax(-1)
    loss = balance_loss(Routing(p, chosen[:, None])).item()
    assert loss == pytest.approx(definition(p, chosen.tolist()))
    assert 0 < loss <= experts + 1e-9


def test_balance_loss_can_be_below_one():
    # The paper's appendix claims a lower bound of 1; three samples refute it.
    p = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.0, 1.0]], dtype=torch.float64)
    loss = balance_loss(Routing(p, p.argmax(1, keepdim=True))).item()
    assert loss == pytest.approx(0.8933, abs=5e-5)


@pytest.mark.parametrize("n", [2, 5, 9])
def test_how_far_below_one_docs_theory_says(n):
    # A share 1 - (n - 1)/(2n) of the batch is undecided and takes expert 0, the rest are sure.
    undecided, sure = n + 1, n - 1
    p = torch.cat([torch.full((undecided, n), 1 / n), torch.eye(n)[1:]]).double()
    experts = torch.cat([torch.zeros(undecided), torch.arange(1, n)]).long()[:, None]
    assert len(p) == undecided + sure
    assert balance_loss(Routing(p, experts)).item() == pytest.approx(1 - (n - 1) / (4 * n))


def test_balance_loss_of_a_uniform_router_is_one():
    p = torch.full((8, 4), 0.25)
    experts = torch.arange(8)[:, None] % 4
    assert balance_loss(Routing(p, experts)).item() == pytest.approx(1.0)


def test_balance_loss_of_layers_in_one_is_each_layers_own():
    p = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    experts = p.topk(2, dim=-1).indices
    each = [balance_loss(Routing(a, b)) for a, b in zip(p, experts, strict=True)]
    torch.testing.assert_close(balance_loss(Routing(p, experts)), torch.stack(each))
