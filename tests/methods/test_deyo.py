from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moetta
from helpers.models import images, small_vit
from helpers.reference import LR, Plain, entropies, ln_c
from helpers.trials import assert_same

PRESETS = {"paper": (0.5, 0.4, 0.2), "released": (0.4, 0.5, 0.5)}


def patch(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image's 16 patches in the order of 16 random numbers, one image after another."""
    side = x.shape[2] // 4
    orders = torch.rand(len(x), 16, generator=generator).argsort(1)
    out = torch.empty_like(x)
    for i in range(len(x)):
        for place in range(16):
            taken = int(orders[i, place])
            r, c, s, t = place // 4, place % 4, taken // 4, taken % 4
            out[i, :, r * side : (r + 1) * side, c * side : (c + 1) * side] = x[
                i, :, s * side : (s + 1) * side, t * side : (t + 1) * side
            ]
    return out


def pixel(x: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(x.shape[2] * x.shape[3], generator=generator)
    return torch.stack([image.flatten(1)[:, order].view(image.shape) for image in x])


def occlusion(x: Tensor, generator: torch.Generator) -> Tensor:
    x = x.clone()
    quarter = x.shape[2] // 4
    inner = slice(quarter, 3 * quarter)
    x[:, :, inner, inner] = x.mean((2, 3), keepdim=True)
    return x


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("destroy", [patch, pixel, occlusion])
def test_several_steps_agree_with_plain_autograd(preset: str, destroy) -> None:
    tau, e0, plpd = PRESETS[preset]
    plain = Plain(small_vit())
    adapter = moetta.adapt(small_vit(), "deyo", preset=preset, lr=LR, destroy=destroy.__name__)
    learnt = 0
    for seed, size in enumerate((16, 16, 5, 1, 16)):
        x = images(size, seed)
        generator = adapter.generator()  # the draws of this step
        z = plain.model(x)
        h, p = entropies(z), z.detach().softmax(1)
        sure = h.detach() < tau * ln_c(z)
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-5)
        assert adapter.last is not None
        assert adapter.last.forwards == size + int(sure.sum())
        if sure.any():
            with torch.no_grad():
                broken = plain.model(destroy(x[sure], generator)).softmax(1)
            y = p[sure].argmax(1)
            rows = torch.arange(len(y))
            drop = p[sure][rows, y] - broken[rows, y]
            keep = drop > plpd
            assert adapter.last.backwards == int(keep.sum())
            assert int(adapter.last.selected.sum()) == int(keep.sum())
            if keep.any():
                learnt += int(keep.sum())
                kept = h[sure][keep]
                weight = torch.exp(e0 * ln_c(z) - kept.detach()) + torch.exp(drop[keep])
                plain.step(plain.gradient((weight * kept).mean()))
        plain.assert_agrees(adapter.state_dict())
    assert learnt > 0


def test_nothing_selected_changes_nothing() -> None:
    for settings, reason in (
        ({"filter_e0": 1e-6}, "no sample below the entropy filter"),
        ({"filter_e0": 1.5, "plpd": 2.0}, "no sample whose probability falls enough"),
    ):
        adapter = moetta.adapt(small_vit(), "deyo", **settings)
        before = adapter.state_dict()
        adapter(images(4))
        assert adapter.last is not None
        assert adapter.last.skipped == reason
        assert adapter.last.backwards == 0
        for key in before:
            if key.startswith("param."):
                assert_same(before[key], adapter.state_dict()[key])


def test_the_shuffle_comes_from_the_seed_and_the_step() -> None:
    settings = {"filter_e0": 1.5, "plpd": -2.0, "lr": LR}
    runs = [
        [moetta.adapt(small_vit(), "deyo", **settings, seed=seed), images(8)] for seed in (0, 0, 1)
    ]
    torch.manual_seed(5)  # the global generator has no say
    states = []
    for adapter, x in runs:
        adapter(x)
        torch.rand(3)
        states.append(adapter.state_dict())
    assert_same(states[0], states[1])
    assert any(not torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_a_grid_finer_than_the_image_is_refused() -> None:
    adapter = moetta.adapt(small_vit(), "deyo", patches=17, filter_e0=1.5)
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="16 x 16 cannot be cut into 17 x 17"):
        adapter(images(2))
    assert_same(before, adapter.state_dict())
