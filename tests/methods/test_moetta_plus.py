from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.moetta_plus import diversity, k_means

SMALL = {"styles": 2, "style_warmup": 8}


def test_k_means_finds_what_is_apart() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.cat((torch.randn(30, 4, generator=g) * 0.1, torch.randn(10, 4, generator=g) + 5))
    centres, sizes = k_means(x, 2, seed=3)
    order = centres[:, 0].argsort()
    assert sizes[order].tolist() == [30, 10]
    torch.testing.assert_close(centres[order[0]], x[:30].mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(centres[order[1]], x[30:].mean(0), rtol=1e-4, atol=1e-4)


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


def test_features_are_centred_by_style_as_defined() -> None:
    """Without steps: the classifier's logits on features less their style's mean."""
    shrink = 5.0
    plain = small_vit().eval()
    heard: list[Tensor] = []
    head = plain.head
    assert isinstance(head, nn.Linear)
    head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].detach()))
    adapter = moetta.adapt(small_vit(), "moetta_plus", lr=1e-12, shrink=shrink, **SMALL)
    sums, counts = torch.zeros(2, head.in_features), torch.zeros(2)
    for turn in range(4):
        x = images(6, turn) * (1 + turn % 2 * 3)
        with torch.no_grad():
            plain(x)
        phi = heard[-1]
        logits = adapter(x)
        assert adapter.last is not None
        style = adapter.last.routing["style"].flatten()
        for k in range(2):
            sums[k] += phi[style == k].sum(0)
            counts[k] += (style == k).sum()
        overall = sums.sum(0) / counts.sum()
        means = (sums + shrink * overall) / (counts + shrink)[:, None]
        expected = (phi - means[style]) @ head.weight.T + head.bias
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-3, atol=1e-3)


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
