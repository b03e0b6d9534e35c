"""The quick way to predict a few images gives what the usual way gives, whatever changes."""

import copy
import pickle

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from moetta.nn import few, fused
from moetta.nn.moe import MoELayerNorm
from moetta.nn.norms import describe


def layer(module=None, experts=9):
    torch.manual_seed(0)
    made = MoELayerNorm(describe("norm", module or nn.LayerNorm(8)), experts)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def usual(made, x, monkeypatch):
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(few, "moe_layer_norm_of_few", lambda *arguments: None)
        return made(x), made.last


def quick(made, x, monkeypatch):
    """With the usual way cut off."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(fused, "moe_layer_norm", None)
        return made(x), made.last


@pytest.mark.parametrize("batch", [1, 2, 5, few.FEW])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(8), (8,)),
        (nn.LayerNorm(8), (7, 8)),
        (nn.LayerNorm(8), (4, 3, 8)),
        (LayerNorm2d(8), (8, 4, 3)),
    ],
)
def test_it_gives_the_same(module, shape, batch, monkeypatch):
    made = layer(module)
    x = torch.randn(batch, *shape)
    (y, found), (expected, last) = (f(made, x, monkeypatch) for f in (quick, usual))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    assert torch.equal(found.experts, last.experts)
    assert torch.equal(found.probabilities, last.probabilities)
    same = x[:1].expand_as(x)  # all to one expert
    (y, found), (expected, last) = (f(made, same, monkeypatch) for f in (quick, usual))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    assert torch.equal(found.experts, last.experts)


@pytest.mark.parametrize("batch", [1, 3])
def test_ties_and_broken_routers_take_the_usual_way(batch, monkeypatch):
    made = layer()
    x = torch.randn(batch, 7, 8)
    for value in (0.0, float("nan")):
        nn.init.constant_(made.router.weight, value)
        nn.init.constant_(made.router.bias, value)
        expected, last = usual(made, x, monkeypatch)
        with torch.no_grad():
            y = made(x)
        torch.testing.assert_close(y, expected, equal_nan=True)
        assert torch.equal(made.last.experts, last.experts)
    assert y.isnan().all()  # so that a guard can see it


def test_more_rows_autocast_gradients_and_several_experts_take_the_usual_way(monkeypatch):
    made = layer()
    monkeypatch.setattr(few.ExpertSums, "get", None)
    made(torch.randn(1, 7, 8))
    with torch.no_grad():
        made(torch.randn(few.FEW + 1, 7, 8))
        made(torch.randn(1, 7, 8, dtype=torch.bfloat16))
        with torch.autocast("cpu"):
            made(torch.randn(1, 7, 8))
        made.top_k = 2
        made(torch.randn(1, 7, 8))
        made.top_k = 1
        parametrize.register_parametrization(made, "expert_bias", nn.Identity())
        made(torch.randn(1, 7, 8))


def step(made):
    made.expert_weight.grad = torch.ones_like(made.expert_weight)
    torch.optim.SGD([made.expert_weight], 0.1).step()


def load(made):
    made.load_state_dict({k: v + 1 for k, v in made.state_dict().items()})


def other_memory(made):
    made.expert_bias.data = made.expert_bias.data + 1


def twice_other_memory(made):
    # The second may get the memory that the first left.
    other_memory(made)
    other_memory(made)


def other_parameter(made):
    made.expert_bias = nn.Parameter(made.expert_bias.detach() + 1)


def in_inference_mode(made):
    with torch.inference_mode():
        made.weight.add_(1)


@pytest.mark.parametrize(
    "change", [step, load, other_memory, twice_other_memory, other_parameter, in_inference_mode]
)
def test_a_change_of_the_parameters_is_seen(change, monkeypatch):
    made = layer()
    x = torch.randn(2, 7, 8)
    before, _ = quick(made, x, monkeypatch)
    change(made)
    after, _ = quick(made, x, monkeypatch)
    torch.testing.assert_close(after, usual(made, x, monkeypatch)[0], rtol=0, atol=1e-6)
    assert not torch.allclose(before, after)


def test_other_values_for_one_call(monkeypatch):
    made = layer()
    x = torch.randn(2, 7, 8)
    before, _ = quick(made, x, monkeypatch)
    with torch.no_grad():
        other = functional_call(made, {"expert_bias": made.expert_bias + 1}, (x,))
    torch.testing.assert_close(other, before + 1)
    assert torch.equal(quick(made, x, monkeypatch)[0], before)


def test_copies_and_files_begin_without_the_sums(monkeypatch):
    made = layer()
    size = len(pickle.dumps(made))
    x = torch.randn(2, 7, 8)
    before, made.last = *quick(made, x, monkeypatch)[:1], None
    assert len(pickle.dumps(made)) == size
    copied = copy.deepcopy(made)
    nn.init.zeros_(copied.expert_weight)
    assert not torch.allclose(quick(copied, x, monkeypatch)[0], before)
    assert torch.equal(quick(made, x, monkeypatch)[0], before)
