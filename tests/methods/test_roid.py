from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain
from moetta.methods.roid import (
    TIED,
    kalman,
    sample_weights,
    smoothed_prior,
    soft_likelihood_ratio,
)
from moetta.nn.augment import augment

PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def test_the_likelihood_ratios_of_the_definition() -> None:
    ratios = soft_likelihood_ratio(torch.tensor([[0.8, 0.2], [1.0, 0.0]]))
    assert ratios.tolist() == pytest.approx([-0.831787, -4.549169], abs=1e-5)


def test_the_weights_of_the_definition() -> None:
    p = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3], [0.1, 0.8, 0.1]])
    weights = sample_weights(p, torch.full((3,), 1 / 3), 3.0)
    assert weights is not None
    assert weights.tolist() == pytest.approx([20.0855, 0, 20.0855], abs=1e-3)


def test_the_prior_of_the_definition() -> None:
    prior = smoothed_prior(torch.tensor([[0.5, 0.3, 0.1, 0.1]] * 2))
    assert prior.tolist() == pytest.approx([0.30, 0.26, 0.22, 0.22], abs=1e-6)


def weights_by_hand(p: Tensor, average: Tensor) -> list[float]:
    d = [1 - float(q @ average / (q.norm() * average.norm())) for q in p]
    c = [float((q * q.log()).sum()) for q in p]
    d = [(v - min(d)) / (max(d) - min(d)) for v in d]
    c = [(v - min(c)) / (max(c) - min(c)) for v in c]
    mean = sum(d) / len(d)
    return [math.exp(3 * a * b) if a >= mean else 0.0 for a, b in zip(d, c, strict=True)]


def crossed(left: Tensor, right: Tensor) -> Tensor:
    """Cross-entropy of two rows of logits, without holding either constant."""
    return -(left.softmax(1) * right.log_softmax(1)).sum(1)


@pytest.mark.parametrize("consistency", [False, True])
@pytest.mark.parametrize("filtered", ["none", "cmf"])
def test_several_steps_agree_with_plain_autograd(
    filtered: str, consistency: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = 0.02
    plain = Plain(small_vit().double(), lr=lr)
    # So few trained numbers would move the anchor too little to see.
    monkeypatch.setattr("moetta.methods.roid.CMF_PARAMETERS", 100)
    adapter = moetta.adapt(
        small_vit().double(), "roid", lr=lr, consistency=consistency, filter=filtered, **PIXELS
    )
    average: Tensor | None = None
    anchor = [p.clone() for p in plain.start]
    q = 0.005 * sum(p.numel() for p in plain.start) / 100
    r, v = 1 - q, 0.0
    velocity: list[Tensor] | None = None
    for seed in range(4):
        x = images(8, seed).double()
        z = plain.model(x)
        p = z.softmax(1)
        if average is None:
            average = torch.full_like(p[0], 1 / p.shape[1]).detach()
        w = torch.tensor(weights_by_hand(p.detach(), average)).double()
        capped = p.clamp(max=0.99)
        slr = -(capped * (capped / (1 - capped) + 1e-5).log()).sum(1)
        loss = (w * slr).sum() / 8
        chosen = w > 0
        if consistency:
            pixels = x[chosen] * 0.5 + 0.5
            view = augment(pixels, adapter.generator(), blur=False, noise=False, padding="reflect")
            z2 = plain.model((view - 0.5) / 0.5)
            sce = 0.5 * crossed(z2, z[chosen]) + 0.5 * crossed(z[chosen], z2)
            loss = loss + (w[chosen] * sce).sum() / 8
        grads = plain.gradient(loss)
        velocity = (
            [g.clone() for g in grads]
            if velocity is None
            else [0.9 * m + g for m, g in zip(velocity, grads, strict=True)]
        )
        moved = [
            theta - lr * (g + 0.9 * m)
            for theta, g, m in zip(plain.parameters, grads, velocity, strict=True)
        ]
        if filtered == "cmf":
            v = 0.9801 * v + q
            beta = max(r / (v + r), 0.89)
            beta = 1.0 if beta >= 0.9999 else beta
            v = beta * v
            anchor = [
                beta * (0.99 * h + 0.01 * s) + (1 - beta) * t
                for h, s, t in zip(anchor, plain.start, moved, strict=True)
            ]
        plain.set([0.99 * t + 0.01 * h for t, h in zip(moved, anchor, strict=True)])
        pi = p.detach().mean(0)
        s = max(1 / 8, 1 / p.shape[1]) / pi.max()
        prior = (pi + s) / (1 + s * p.shape[1])
        expected = p.detach().log() + prior.log()
        torch.testing.assert_close(adapter(x).double(), expected, rtol=1e-4, atol=1e-4)
        average = 0.9 * average + 0.1 * pi
        state = adapter.state_dict()
        for name, mine in zip(plain.names, plain.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-5, atol=1e-6)
        assert adapter.last is not None
        assert 0 < int(chosen.sum()) < 8
        assert adapter.last.backwards == int(chosen.sum())
        assert adapter.last.forwards == 8 + consistency * int(chosen.sum())
        assert sum(adapter.last.losses.values()) == pytest.approx(loss.item(), rel=1e-3)
        if filtered == "cmf":
            assert state["running.variance"].item() == pytest.approx(v, rel=1e-5)
            for name, mine, then in zip(plain.names, anchor, plain.start, strict=True):
                theirs = state[f"running.anchor.{name}"]
                torch.testing.assert_close(theirs, mine.detach(), rtol=1e-5, atol=1e-6)
                assert not torch.equal(theirs, then)


def test_the_filters_first_gains() -> None:
    """38,400 trained numbers: the share of the anchor that is kept."""
    variance, kept = torch.zeros((), dtype=torch.float64), []
    for _ in range(3):
        share, variance = kalman(variance, 0.005)
        kept.append(share.item())
    assert kept == pytest.approx([0.995, 0.990172, 0.985554], abs=1e-6)


def test_the_filter_keeps_at_least_89_percent_and_all_if_nearly_all() -> None:
    assert kalman(torch.tensor(1.0), 0.005)[0] == pytest.approx(0.89)
    assert kalman(torch.tensor(0.0), 5e-5)[0] == 1


def test_a_reset_returns_to_the_source_and_forgets_average_and_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moetta.methods.roid.CMF_PARAMETERS", 100)
    adapter = moetta.adapt(small_vit(), "roid", lr=0.02, filter="cmf", **PIXELS)
    start = adapter.state_dict()
    for seed in range(4):
        adapter(images(8, seed))
    moved = adapter.state_dict()
    changed = {k for k in moved if k not in start or not torch.equal(moved[k], start[k])}
    assert {"running.probability", "running.variance"} <= changed
    assert any(name.startswith("running.anchor.") for name in changed)
    adapter.reset()
    after = adapter.state_dict()
    assert after.keys() == start.keys()
    assert all(torch.equal(after[name], start[name]) for name in start)


def test_the_second_view_is_of_the_chosen_samples_only() -> None:
    adapter = moetta.adapt(small_vit(), "roid", **PIXELS)
    adapter(images(8, 0))
    assert adapter.last is not None
    chosen = int(adapter.last.selected.sum())  # type: ignore[union-attr]
    assert 0 < chosen < 8
    assert adapter.last.forwards == 8 + chosen
    assert adapter.last.backwards == chosen
    assert set(adapter.last.losses) == {"likelihood", "consistency"}


def test_tied_predictions_are_not_learnt_from() -> None:
    adapter = moetta.adapt(small_vit(), "roid", **PIXELS)
    start = adapter.state_dict()
    for batch in (images(1, 0), images(1, 0).expand(4, -1, -1, -1)):
        assert torch.isfinite(adapter(batch)).all()
        assert adapter.last is not None
        assert adapter.last.skipped == TIED
    after = adapter.state_dict()
    assert all(torch.equal(after[k], start[k]) for k in start if k.startswith("param."))


def test_predictions_that_differ_by_rounding_only_are_tied() -> None:
    """The same shares in another order: equally certain, and equally far from a flat average."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7], [0.2, 0.7, 0.1]])
    assert sample_weights(p, torch.full((3,), 1 / 3), 3.0) is None
    assert sample_weights(p, torch.tensor([0.5, 0.3, 0.2]), 3.0) is None


def test_the_released_code_multiplies_the_logits() -> None:
    released, off = (
        moetta.adapt(small_vit(), "roid", **PIXELS, **extra)
        for extra in ({"preset": "released"}, {"prior": "off"})
    )
    x = images(4, 0)
    plain = off(x)
    prior = smoothed_prior(plain.softmax(1))
    torch.testing.assert_close(released(x), plain * prior, rtol=1e-4, atol=1e-5)


def test_unknown_pixels_are_refused_with_a_way_out() -> None:
    model = torch.nn.Sequential(small_vit())  # says nothing about its pixels
    with pytest.raises(ValueError, match=r"pass mean= and std=.*or set consistency=False"):
        moetta.adapt(model, "roid")
    moetta.adapt(model, "roid", consistency=False)(images(4, 0))
