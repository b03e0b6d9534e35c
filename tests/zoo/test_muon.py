from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moetta.zoo.muon import Muon, is_matrix, orthogonalised
from moetta.zoo.recipes import RECIPES
from moetta.zoo.trainer import optimisers


@given(rows=st.integers(1, 24), columns=st.integers(1, 24), seed=st.integers(0, 2**16))
def test_every_singular_value_comes_near_one_and_the_directions_stay(rows, columns, seed):
    g = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, rank, generator=g))[0]
    v = torch.linalg.qr(torch.randn(columns, rank, generator=g))[0]
    values = torch.linspace(1, 0.05, rank)
    found = u.mT @ orthogonalised(u * values @ v.mT) @ v
    assert found.diagonal().sub(1).abs().max() < 0.35
    assert found.sub(torch.diag(found.diagonal())).abs().max() < 1e-3


def test_a_step_has_adamws_size_and_decays_the_weights():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(64, 32))
    weights.grad = torch.randn(64, 32)
    Muon([weights], lr=0.01).step()
    # Orthogonal, 64 x 32: entries of root mean square 1 / 8 (its singular values are 0.7 to 1.2).
    assert weights.pow(2).mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.25)
    still = nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    Muon([still], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still, torch.full((4, 4), 0.95))


def test_momentum_outlives_one_gradient():
    weights = nn.Parameter(torch.zeros(3, 3))
    optimiser = Muon([weights], lr=0.1)
    weights.grad = torch.eye(3)
    optimiser.step()
    before = weights.detach().clone()
    weights.grad = torch.zeros(3, 3)
    optimiser.step()
    assert (weights - before).diagonal().max() < -0.01
    weights.grad = None  # a frozen parameter stays
    before = weights.detach().clone()
    optimiser.step()
    assert torch.equal(weights, before)


@pytest.mark.parametrize("name", RECIPES)
def test_each_parameter_has_one_optimiser(name):
    model = RECIPES[name].shape.build(10)
    for kind in ("adamw", "muon"):
        found = optimisers(model, replace(RECIPES[name], optimiser=kind))
        held = [p for o in found for group in o.param_groups for p in group["params"]]
        assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
        assert len(found) == (2 if kind == "muon" else 1)
    matrices = {k for k, p in model.named_parameters() if is_matrix(k, p)}
    assert any("mlp.fc1" in k or "layer1.0.conv1" in k for k in matrices)
    assert not [k for k in matrices if k.startswith("fc.")]  # a ResNet's head
    unfit = ("head", "conv_dw", "cls_token", "pos_embed", "bias", "norm")
    assert not [k for k in matrices if any(word in k for word in unfit)]
