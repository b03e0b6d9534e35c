from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.moetta_plus import diversity

SMALL = {"styles": 2, "style_warmup": 8}


def test_images_of_one_style_share_an_expert() -> None:
    adapter = moetta.adapt(small_vit(), "moetta_plus", **SMALL)
    bright = images(16, 0) * torch.tensor([0.2, 4.0]).repeat(8)[:, None, None, None]
    for _ in range(3):
        adapter(bright)
    assert adapter.last is not None
    (styles,) = adapter.last.routing.values()
    assert len(set(styles[0::2].flatten().tolist())) == 1
    assert len(set(styles[1::2].flatten().tolist())) == 1
    assert styles[0].item() != styles[1].item()


@pytest.mark.parametrize("balanced", [False, True])
def test_features_are_centred_by_style_as_defined(balanced: bool) -> None:
    """Without steps: the classifier's logits on features less their style's centre."""
    shrink = 5.0
    plain = small_vit().eval()
    heard: list[Tensor] = []
    head = plain.head
    assert isinstance(head, nn.Linear)
    head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].detach()))
    adapter = moetta.adapt(
        small_vit(), "moetta_plus", lr=1e-12, shrink=shrink, balanced=balanced, **SMALL
    )
    weight = head.weight.detach()
    vectors = weight - weight.mean(0)
    sums, counts = torch.zeros(2, head.in_features), torch.zeros(2)
    centres = torch.zeros(2, head.in_features)
    predicted: list[Tensor] = []
    along: list[Tensor] = []
    for turn in range(4):
        x = images(6, turn) * (1 + turn % 2 * 3)
        with torch.no_grad():
            plain(x)
        phi = heard[-1]
        logits = adapter(x)
        assert adapter.last is not None
        style = adapter.last.routing["style"].flatten()
        # The classes are those that the centres before this batch lead to.
        classes = ((phi - centres[style]) @ weight.T + head.bias.detach()).argmax(1)
        predicted += classes
        along += (phi * vectors[classes]).sum(1)
        for k in range(2):
            sums[k] += phi[style == k].sum(0)
            counts[k] += (style == k).sum()
        overall = sums.sum(0) / counts.sum()
        centres = (sums + shrink * overall) / (counts + shrink)[:, None]
        if balanced:
            seen = torch.stack(predicted)
            length = torch.stack(along).sum() / vectors[seen].square().sum()
            share = torch.bincount(seen, minlength=len(weight)) / len(seen)
            centres = centres - length * (share - 1 / len(weight)) @ vectors
        expected = (phi - centres[style]) @ weight.T + head.bias
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-3, atol=1e-3)


def test_traffic_of_one_class_keeps_its_class() -> None:
    """Features around one class: their mean is that class, and must not be subtracted."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Flatten(), nn.Linear(16, 5)
    )
    last, middle = model[4], model[1]
    assert isinstance(last, nn.Linear)
    assert isinstance(middle, nn.Linear)
    with torch.no_grad():
        middle.weight.copy_(torch.eye(16))
        last.weight.copy_(4 * (last.weight - last.weight.mean(0)))
        one = (3 * last.weight[2] / last.weight[2].norm()).expand(64, 1, 16)
    kept = {}
    for balanced in (False, True):
        adapter = moetta.adapt(model, "moetta_plus", balanced=balanced, lr=1e-6, **SMALL)
        drawn = torch.Generator().manual_seed(1)
        wave = [one + torch.randn(64, 1, 16, generator=drawn) for _ in range(20)]
        with torch.no_grad():
            sure = float((model(wave[-1]).argmax(1) == 2).float().mean())
        answers = [adapter(batch) for batch in wave][-1]
        kept[balanced] = float((answers.argmax(1) == 2).float().mean()) / sure
    assert kept[True] > 0.8
    assert kept[False] < 0.5


def test_the_diversity_term_has_the_gradient_of_the_averages_entropy() -> None:
    z = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    mean = z.softmax(1).mean(0)
    (mine,) = torch.autograd.grad(diversity(z.softmax(1), mean.detach()), z)
    (theirs,) = torch.autograd.grad((mean * mean.log()).sum(), z)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("radius", [0.01, 0.05])
def test_no_expert_goes_beyond_the_radius(radius: float) -> None:
    model = small_vit()
    adapter = moetta.adapt(model, "moetta_plus", lr=5.0, radius=radius, **SMALL)
    for turn in range(6):
        adapter(images(8, turn))
    squares = torch.zeros(2)
    scale = 0.0
    for name, (weight, bias) in adapter.experts().items():
        squares += weight.detach().square().sum(1) + bias.detach().square().sum(1)
        scale += float(model.get_submodule(name).weight.detach().square().sum())  # type: ignore[union-attr, operator]
    assert float(squares.max().sqrt()) <= radius * scale**0.5 * (1 + 1e-4)
    assert float(squares.max()) > 0


def test_layers_before_the_styles_are_left_alone() -> None:
    adapter = moetta.adapt(small_vit(), "moetta_plus", style_layer=2, **SMALL)
    assert (
        len(adapter.experts())
        == len([m for m in small_vit().modules() if isinstance(m, nn.LayerNorm)]) - 2
    )
    assert adapter.expert_counts() == {"style": 2}


def test_a_warm_up_shorter_than_the_styles_is_refused() -> None:
    with pytest.raises(ValueError, match="style_warmup must be at least styles=9, got 4"):
        moetta.adapt(small_vit(), "moetta_plus", styles=9, style_warmup=4)
