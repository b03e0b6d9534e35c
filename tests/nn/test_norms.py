"""Finding norm layers: which, how many, of what kind."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision.models.convnext
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn

from helpers.models import FAMILIES
from moetta.methods.sar import early
from moetta.nn.norms import BatchStatNorm, describe, find_norms, normalise, parse_indices


def meta(name: str) -> nn.Module:
    """The real architecture without its weights: nothing is computed."""
    with torch.device("meta"):
        return timm.create_model(name)


@pytest.mark.parametrize(
    ("name", "layers", "parameters", "sar_layers", "channels_first"),
    [
        ("vit_base_patch16_224", 25, 38_400, 18, 0),
        ("vit_large_patch16_224", 49, 100_352, 42, 0),
        ("convnext_base", 41, 40_192, 38, 5),
    ],
)
def test_the_papers_models(
    name: str, layers: int, parameters: int, sar_layers: int, channels_first: int
) -> None:
    model = meta(name)
    norms = find_norms(model)
    assert len(norms) == layers
    assert sum(p.numel() for norm in norms for _, p in norm.parameters()) == parameters
    assert len(early(model, norms)) == sar_layers
    assert sum(norm.channels_first for norm in norms) == channels_first


@pytest.mark.parametrize(
    ("family", "kinds", "channels_first"),
    [
        ("timm_vit", {"layer": 5}, 0),
        ("timm_deit", {"layer": 5}, 0),
        ("timm_swin", {"layer": 11}, 0),
        ("timm_convnext", {"layer": 9}, 5),
        ("timm_resnet", {"batch": 13}, 0),
        ("timm_resnet_gn", {"group": 13}, 0),
        ("tv_vit", {"layer": 5}, 0),
        ("tv_swin", {"layer": 11}, 0),
        ("tv_convnext", {"layer": 5}, 3),
        ("torch_encoder", {"layer": 4}, 0),
        ("hf_vit", {"layer": 5}, 0),
        ("hf_dinov2", {"layer": 5}, 0),
        ("hf_convnext", {"layer": 9}, 4),
        ("hf_bert", {"layer": 5}, 0),
    ],
)
def test_every_norm_of_every_family_is_found(family: str, kinds: dict, channels_first: int) -> None:
    norms = find_norms(FAMILIES[family].shared())
    found: dict[str, int] = {}
    for norm in norms:
        found[norm.kind] = found.get(norm.kind, 0) + 1
    assert found == kinds
    assert sum(norm.channels_first for norm in norms) == channels_first
    names = dict(FAMILIES[family].shared().named_parameters())
    for norm in norms:
        assert [k for k, _ in norm.parameters()] == [f"{norm.name}.weight", f"{norm.name}.bias"]
        assert all(names[k] is p for k, p in norm.parameters())


class ByHand2d(nn.LayerNorm):
    """A channels-first LayerNorm written by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + self.eps).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ByHand(nn.LayerNorm):
    """Over the last axis, written by hand, as CLIP's is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return self.weight * x + self.bias


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (nn.LayerNorm, False),
        (timm.layers.LayerNorm, False),
        (timm.layers.LayerNormFp32, False),
        (timm.layers.LayerNormAct, False),
        (timm.layers.LayerNorm2d, True),
        (timm.layers.LayerNorm2dFp32, True),
        (timm.layers.LayerNormAct2d, True),
        (timm.layers.LayerNormAct2dFp32, True),
        (torchvision.models.convnext.LayerNorm2d, True),
        (ByHand, False),
        (ByHand2d, True),
    ],
)
def test_a_layer_shows_which_axis_it_normalises(make, first: bool) -> None:
    assert describe("x", make(6)).channels_first == first
    assert not describe("x", make(1)).channels_first  # one feature: either axis will do


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(4, elementwise_affine=False),
        nn.LayerNorm((4, 4)),
        nn.BatchNorm2d(4, affine=False),
        nn.InstanceNorm2d(4),
        nn.RMSNorm(4),
        nn.Linear(4, 4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_layers_are_none(module: nn.Module) -> None:
    assert describe("x", module) is None


def test_a_model_without_norms_is_described() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.RMSNorm(2))
    with pytest.raises(ValueError, match="found 2 Linear, 1 ReLU, 1 RMSNorm"):
        find_norms(model)


@given(st.sets(st.integers(0, 30), max_size=12))
def test_indices_go_there_and_back(chosen: set[int]) -> None:
    assert parse_indices(",".join(map(str, chosen)), 31) == chosen
    ranges, ordered = [], sorted(chosen)
    for i in ordered:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    assert parse_indices(", ".join(f"{a}-{b}" for a, b in ranges), 31) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "cannot read 'a'"),
        ("1-", "cannot read '1-'"),
        ("-3", "cannot read '-3'"),
        ("5-3", "'5-3' is not within"),
        ("0-25", "'0-25' is not within the model's norm layers 0-24"),
        ("25", "'25' is not within"),
    ],
)
def test_unreadable_indices_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_indices(text, 25)


@pytest.mark.parametrize("make", [nn.BatchNorm2d, BatchNormAct2d])
def test_batch_statistics_are_those_of_training(make) -> None:
    norm = make(3).eval()
    norm.running_mean.normal_()
    nn.init.normal_(norm.weight)
    x = torch.randn(4, 3, 5, 5) * 3 + 1
    kept = norm.running_mean.clone()
    got = BatchStatNorm(norm)(x)
    assert torch.equal(norm.running_mean, kept)
    torch.testing.assert_close(got, norm.train()(x))
    assert set(BatchStatNorm(norm).state_dict()) == set(norm.state_dict())


def test_a_single_value_has_no_variance() -> None:
    norm = nn.BatchNorm1d(3).eval()
    norm.running_mean.normal_()
    x = torch.randn(1, 3)
    torch.testing.assert_close(BatchStatNorm(norm)(x), norm(x))


def test_normalise_is_the_layer_without_its_affine_part() -> None:
    x = torch.randn(4, 6, 3, 3) * 2 + 1
    group = nn.GroupNorm(2, 6)
    torch.testing.assert_close(normalise(group, x), group(x))
    batch = nn.BatchNorm2d(6).eval()
    batch.running_mean.normal_()
    torch.testing.assert_close(normalise(batch, x), batch(x))
    got = normalise(batch, x, batch_statistics=True)
    torch.testing.assert_close(got.mean((0, 2, 3)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(got.var((0, 2, 3), correction=0), torch.ones(6), atol=1e-4, rtol=0)
