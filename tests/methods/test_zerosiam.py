from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain, entropies
from moetta.methods.zerosiam import symmetric_divergence


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a.log() - b.log())).sum(-1)


def test_the_worked_example() -> None:
    plain, stretched = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    assert entropies(stretched).item() == pytest.approx(0.365334, abs=1e-6)
    assert symmetric_divergence(stretched, plain).item() == pytest.approx(0.149738, abs=1e-6)
    assert entropies(plain).item() == pytest.approx(0.582203, abs=1e-6)


def test_the_worked_example_through_the_method() -> None:
    """phi = (1, 0), the classifier is the identity, the predictor is stretched to diag(2, 1)."""
    norm, head = nn.LayerNorm(2), nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
        norm.weight.fill_(0.5)
        norm.bias.fill_(0.5)
    norm.eps = 0.0
    adapter = moetta.adapt(nn.Sequential(norm, head), "zerosiam")
    row = torch.tensor([[1.0, -1.0]])
    start = adapter.state_dict()
    adapter(row)
    assert adapter.last is not None
    assert adapter.last.losses["entropy"] == pytest.approx(0.582203, abs=1e-5)
    assert adapter.last.losses["alignment"] == pytest.approx(0, abs=1e-6)
    adapter.load_state_dict(start)
    adapter.predictor.data[0, 0] = 2  # type: ignore[attr-defined]
    adapter(row)
    losses = adapter.last.losses
    assert losses["entropy"] == pytest.approx(0.365334, abs=1e-5)
    assert losses["alignment"] == pytest.approx(0.149738, abs=1e-5)
    assert sum(losses.values()) == pytest.approx(0.515072, abs=1e-5)


def test_several_steps_agree_with_plain_autograd() -> None:
    plain = Plain(small_vit().double())
    heard: list[Tensor] = []
    head = plain.model.head
    assert isinstance(head, nn.Linear)
    head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    predictor = torch.eye(head.in_features).double().requires_grad_(True)
    velocity = torch.zeros_like(predictor)
    adapter = moetta.adapt(small_vit().double(), "zerosiam", lr=1.28, predictor_lr=3.2)
    for seed, size in enumerate((8, 8, 1, 5)):
        x = images(size, seed).double()
        z = plain.model(x)
        u = heard[-1] @ predictor.T @ head.weight.T + head.bias
        p_r, p_o = z.detach().softmax(1), u.softmax(1)
        loss = (entropies(u) + kl(p_r, p_o) + kl(p_o, p_r)).mean()
        *grads, own = torch.autograd.grad(loss, [*plain.parameters, predictor])
        share = 2 / 64 if size == 1 else size / 64
        plain.lr = 1.28 * share
        plain.step(grads)
        velocity = 0.9 * velocity + own
        predictor = (predictor - 3.2 * share * velocity).detach().requires_grad_(True)
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-5)
        assert adapter.last is not None
        assert sum(adapter.last.losses.values()) == pytest.approx(loss.item(), abs=1e-5)
        assert (adapter.last.forwards, adapter.last.backwards) == (size, size)
        state = adapter.state_dict()
        torch.testing.assert_close(
            state["param.predictor"].double(), predictor.detach(), rtol=1e-4, atol=1e-5
        )
        for name, mine in zip(plain.names, plain.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-4, atol=1e-5)


def test_the_first_step_of_the_norm_layers_is_tents() -> None:
    tent = moetta.adapt(small_vit(), "tent", lr=0.01)
    zero = moetta.adapt(small_vit(), "zerosiam", lr=0.01, scale_rates=False)
    zero(images(8, 0))
    tent(images(8, 0))
    mine = zero.state_dict()
    for name, value in tent.state_dict().items():
        if name.startswith("param."):
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("size", "share"), [(128, 2), (64, 1), (16, 1 / 4), (1, 1 / 32)])
def test_rates_follow_the_batch_size(size: int, share: float) -> None:
    """Linear in it, and doubled for a single image."""
    scaled = moetta.adapt(small_vit(), "zerosiam", lr=0.01, predictor_lr=0.02)
    plain = moetta.adapt(
        small_vit(), "zerosiam", lr=0.01 * share, predictor_lr=0.02 * share, scale_rates=False
    )
    x = images(size, 3)
    scaled(x)
    plain(x)
    left, right = scaled.state_dict(), plain.state_dict()
    for name in left:
        if name.startswith("param."):
            assert torch.equal(left[name], right[name])


def test_presets_hold_the_authors_rates() -> None:
    rates = {
        "paper": (5e-3, 5e-3),
        "vit_small": (1e-3, 1e-2),
        "convnext_tiny": (2.5e-4, 2.5e-3),
        "swin_tiny": (5e-4, 2.5e-3),
        "resnet50_gn": (2.5e-3, 2.5e-2),
    }
    for preset, expected in rates.items():
        config = moetta.list_methods()["zerosiam"].config.preset(preset)
        assert (config.lr, config.predictor_lr) == expected  # type: ignore[attr-defined]
        assert (config.momentum, config.alignment) == (0.9, 1.0)  # type: ignore[attr-defined]
