from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain, entropies, ln_c
from moetta.methods.spa import drop_frequencies, low_frequencies, rescaled

PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def test_the_noise_is_rescaled_as_defined() -> None:
    found = rescaled(torch.tensor([1.0, 0.5, 0.5, 0.0]), 0.4).tolist()
    assert found == pytest.approx([1, 0.516398, 0.516398, 0], abs=1e-6)


def test_the_window_of_low_frequencies() -> None:
    first, last = low_frequencies(224, 0.2)
    assert (first, last, last - first + 1) == (90, 133, 44)


@settings(max_examples=25, deadline=None)
@given(side=st.integers(5, 40), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_view_without_some_frequencies_is_real_and_keeps_the_rest(
    side: int, share: float, seed: int
) -> None:
    x = torch.randn(2, 3, side, side + 3, generator=torch.Generator().manual_seed(seed)).double()
    view = drop_frequencies(x, 0.3, share, torch.Generator().manual_seed(seed))
    before, after = torch.fft.fft2(x), torch.fft.fft2(view)
    kept = after.abs() > 1e-6
    # A frequency is whole or gone: were the mask not symmetric, the real part would halve some.
    torch.testing.assert_close(after[kept], before[kept], rtol=1e-6, atol=1e-6)
    gone = torch.fft.fftshift((before - after).abs() > 1e-6, dim=(-2, -1)).any(0).any(0)
    rows = gone.any(1).nonzero().flatten().tolist()
    top, bottom = low_frequencies(side, 0.3)
    # The mirrored mask may reach one row further on the other side.
    assert all(top - 1 <= row <= bottom + 1 for row in rows)


def test_no_drop_returns_the_image() -> None:
    x = images(2, 0)
    view = drop_frequencies(x, 0.2, 0.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(view, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [32, 33])
def test_each_low_frequency_is_dropped_as_often_as_said(side: int) -> None:
    """Were both opposite frequencies drawn and one enough to drop both, 36 % would go."""
    x = torch.randn(1, 1, side, side, generator=torch.Generator().manual_seed(0)).double()
    first, last = low_frequencies(side, 0.5)
    generator, gone = torch.Generator().manual_seed(1), 0.0
    for _ in range(200):
        after = torch.fft.fftshift(torch.fft.fft2(drop_frequencies(x, 0.5, 0.2, generator)))
        window = after.abs()[0, 0, first : last + 1, first : last + 1]
        gone += float((window < 1e-9).double().mean()) / 200
    assert gone == pytest.approx(0.2, abs=0.01)


def dropped_by_hand(x: Tensor, share: float, rate: float, generator: torch.Generator) -> Tensor:
    """The first view, frequency by frequency; of two opposite ones, one draw decides for both."""
    height, width = x.shape[-2:]
    draws = torch.rand(height, width, generator=generator)
    spectrum = torch.fft.fft2(x)
    sides = int(share * height), int(share * width)
    for row in range(height // 2 - sides[0] // 2, height // 2 - sides[0] // 2 + sides[0]):
        for column in range(width // 2 - sides[1] // 2, width // 2 - sides[1] // 2 + sides[1]):
            f, g = row - height // 2, column - width // 2
            here, opposite = (f % height, g % width), (-f % height, -g % width)
            if draws[min(here, opposite)] < rate:
                spectrum[..., here[0], here[1]] = 0
                spectrum[..., opposite[0], opposite[1]] = 0
    view = torch.fft.ifft2(spectrum)
    assert float(view.imag.abs().max()) < 1e-6
    return view.real


@pytest.mark.parametrize("extra", ["none", "tent", "eta"])
def test_several_steps_agree_with_plain_autograd(extra: str) -> None:
    """Three steps with both views drawn by the test from the same random numbers."""
    lr, rate = 0.02, 0.05
    plain = Plain(small_vit().double(), lr=lr)
    heard: list[Tensor] = []
    head = plain.model.head
    assert isinstance(head, nn.Linear)
    head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    predictor = torch.eye(head.in_features).double()
    velocity = torch.zeros_like(predictor)
    adapter = moetta.adapt(
        small_vit().double(), "spa", lr=lr, predictor_lr=rate, patch=8, extra=extra, window=0.6,
        **PIXELS,
    )  # fmt: skip
    average: Tensor | None = None
    steps = sure = redundant = 0
    amounts: Tensor | None = None
    rising: Tensor | None = None
    for seed, size in enumerate((8, 8, 3, 8, 8)):
        x = images(size, seed).double()
        side = x.shape[-1]
        patches = -(-side // 8)
        if amounts is None:
            amounts = torch.full((patches, patches), 0.4**0.5).double()
        a = amounts.clone().requires_grad_(True)
        predictor = predictor.detach().requires_grad_(True)
        z = plain.model(x)
        clean, z = z, z.detach()
        dropped = dropped_by_hand(x.float(), 0.6, 0.2, adapter.generator()).double()
        noise = torch.randn(1, *x.shape[1:], generator=adapter.generator(1)).double()
        part = torch.kron(a, torch.ones(8, 8).double())[:side, :side] ** 2
        noisy = ((1 - part) * x + part * noise).clamp(-1, 1)
        log_p = z.log_softmax(1)
        loss, pairs = torch.zeros(()).double(), 0
        for view in (dropped, noisy):
            plain.model(view)
            u = (heard[-1] @ predictor.T @ head.weight.T + head.bias).log_softmax(1)
            harder = log_p.amax(1) > u.detach().amax(1)
            pairs += int(harder.sum())
            divergence = (log_p.exp() * (log_p - u)).sum(1)
            if harder.any():
                loss = loss + divergence[harder].mean()
        if extra == "tent":
            loss, pairs = loss + 0.1 * entropies(clean).mean(), pairs + size
        elif extra == "eta":
            h, p, e0 = entropies(clean), z.softmax(1), 0.4 * ln_c(z)
            keep = h.detach() < e0
            if average is not None:
                fresh = (p @ average / (p.norm(dim=1) * average.norm())).abs() < 0.05
                redundant += int((keep & ~fresh).sum())
                keep = keep & fresh
            if keep.any():
                mean = p[keep].mean(0)
                average = mean if average is None else 0.9 * average + 0.1 * mean
                loss = loss + 0.1 * (torch.exp(e0 - h.detach()) * h)[keep].mean()
            pairs, sure = pairs + int(keep.sum()), sure + int(keep.sum())
        expected = {"forwards": 3 * size, "backwards": pairs, "skipped": None}
        if not pairs:
            adapter(x)
            expected["skipped"] = "no sample selected"
            assert {k: getattr(adapter.last, k) for k in expected} == expected
            continue
        steps += 1
        *grads, own, up = torch.autograd.grad(
            loss, [*plain.parameters, predictor, a], materialize_grads=True
        )
        plain.step(grads)
        velocity = 0.9 * velocity + own
        predictor = predictor.detach() - rate * velocity
        rising = up if rising is None else 0.9 * rising + up
        moved = amounts + rising
        amounts = (moved * (0.4 / (moved**2).mean()).sqrt()).clamp(-1, 1)
        torch.testing.assert_close(adapter(x), z, rtol=1e-5, atol=1e-5)
        assert {k: getattr(adapter.last, k) for k in expected} == expected
        state = adapter.state_dict()
        for name, mine in zip(plain.names, plain.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state["running.noise"].double(), amounts, rtol=1e-3, atol=1e-4)
        assert (average is None) == ("running.probability" not in state)
        if average is not None:
            found = state["running.probability"].double()
            torch.testing.assert_close(found, average, rtol=1e-4, atol=1e-5)
    assert steps >= 3
    assert float((amounts - 0.4**0.5).abs().max()) > 0.01  # the noise moved
    if extra == "eta":
        assert sure > 0
        assert redundant > 0


def test_presets_hold_the_authors_settings() -> None:
    settings = {"paper": (0.01, 0.05, 0.2, 0.4), "resnet50_gn": (2.5e-3, 2.5e-2, 0.1, 0.1)}
    for preset, expected in settings.items():
        c = moetta.list_methods()["spa"].config.preset(preset).to_dict()
        assert (c["lr"], c["predictor_lr"], c["frequency_drop"], c["noise"]) == expected
        assert (c["momentum"], c["window"], c["noise_lr"], c["patch"]) == (0.9, 0.2, 1.0, 16)


def test_nothing_is_learnt_where_no_view_is_harder() -> None:
    model = small_vit()
    assert isinstance(model.head, nn.Linear)
    nn.init.zeros_(model.head.weight)  # every image, and every view of it, gets the same answer
    adapter = moetta.adapt(model, "spa", **PIXELS)
    start = adapter.state_dict()
    assert torch.isfinite(adapter(images(4, 0))).all()
    assert adapter.last is not None
    assert adapter.last.skipped == "no sample selected"
    after = adapter.state_dict()
    assert all(torch.equal(after[k], start[k]) for k in start if k.startswith("param."))


def test_other_inputs_than_images_are_refused() -> None:
    with pytest.raises(ValueError, match="pass mean= and std="):
        moetta.adapt(nn.Sequential(small_vit()), "spa")
