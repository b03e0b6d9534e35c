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


@pytest.mark.parametrize("lr", [0.03, 30.0])
def test_steps_equal_a_recomputation(lr: float) -> None:
    """Five steps from the formulas; at the high rate the stride decides about every step."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(8, 4)
    )
    first, middle, late, _, head = model
    config = {"lr": lr, "stride": 0.02, "radius": 0.1, "pull": 0.1, "shared": 0.5, "horizon": 40}
    adapter = moetta.adapt(
        model, "moetta_plus", balanced=False, shrink=5.0, diversity=2.0, **config, **SMALL
    )
    scale = late.weight.detach().norm()  # type: ignore[union-attr]
    offset = torch.zeros(2, 16)  # of scale, then of shift
    velocity = torch.zeros(2, 16)
    sums, counts = torch.zeros(2, 8), torch.zeros(2)
    marginal, mean_entropy = torch.full((4,), 0.25), 0.0
    by_style = torch.full((2, 4), 0.25)
    shortened = 0
    for turn in range(1, 6):
        x = 2 * torch.randn(10, 1, 6, generator=torch.Generator().manual_seed(turn))
        logits = adapter(x)
        assert adapter.last is not None
        style = adapter.last.routing["style"].flatten()
        one = nn.functional.one_hot(style, 2).float()
        leaf = offset.clone().requires_grad_()
        hidden = middle(first(x))[:, 0]
        normed = nn.functional.layer_norm(hidden, (8,))
        gamma, beta = (late.weight + leaf[style, :8], late.bias + leaf[style, 8:])
        phi = normed * gamma + beta
        sums, counts = sums + one.T @ phi.detach(), counts + one.sum(0)
        overall = sums.sum(0) / counts.sum()
        centres = (sums + 5 * overall) / (counts + 5)[:, None]
        z = head(phi) - (centres @ head.weight.T).detach()[style]  # type: ignore[operator]
        torch.testing.assert_close(logits, z.detach(), rtol=1e-4, atol=1e-5)
        p = z.softmax(1)
        entropies = -(p * p.log()).sum(1)
        mean_entropy += (float(entropies.detach().mean()) - mean_entropy) / turn
        chosen = entropies.detach() <= mean_entropy
        weight = (1.0 - entropies.detach()).exp()
        loss = (weight * entropies)[chosen].mean()
        marginal = 0.75 * marginal + 0.25 * p.detach().mean(0)
        for k in range(2):
            if (style == k).any():
                part = min(1.0, int((style == k).sum()) / 20)  # half of the horizon for each style
                by_style[k] = (1 - part) * by_style[k] + part * p.detach()[style == k].mean(0)
        logs = ((marginal + by_style[style]) / 2).log()
        loss = loss + 2 * (p * (logs - logs.mean(1, keepdim=True))).sum(1).mean()
        (grad,) = torch.autograd.grad(10 / 64 * loss, leaf)
        grad = grad + 0.5 * grad.sum(0)
        grad = grad * (1 - (offset.norm(dim=1) / (0.1 * scale)) ** 2)[:, None]
        velocity = 0.9 * velocity + grad
        step = -lr * velocity
        for k in range(2):
            most = 0.02 * 10 / 64 * scale
            if step[k].norm() > most:
                step[k] *= most / step[k].norm()
                shortened += 1
        offset = (offset + step) * (1 - 0.1 * 10 / 64)
        mine = torch.cat((adapter.experts()["2"][0], adapter.experts()["2"][1]), 1).detach()
        torch.testing.assert_close(mine, offset, rtol=1e-3, atol=1e-6)
    assert shortened == (10 if lr > 1 else 0)


def test_no_rate_moves_an_expert_further_than_the_stride() -> None:
    for lr in (0.1, 10.0):
        adapter = moetta.adapt(small_vit(), "moetta_plus", lr=lr, stride=1e-4, **SMALL)
        adapter(images(64, 0))
        squares = sum(
            w.detach().square().sum(1) + b.detach().square().sum(1)
            for w, b in adapter.experts().values()
        )
        scale = sum(
            float(small_vit().get_submodule(name).weight.detach().square().sum())  # type: ignore[union-attr, operator, misc]
            for name in adapter.experts()
        )
        assert isinstance(squares, Tensor)
        assert float(squares.max().sqrt()) <= 1e-4 * scale**0.5 * (1 + 1e-4)


@pytest.mark.parametrize("radius", [0.01, 0.05])
def test_no_expert_goes_beyond_the_radius(radius: float) -> None:
    model = small_vit()
    adapter = moetta.adapt(model, "moetta_plus", lr=5.0, stride=0, radius=radius, **SMALL)
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
