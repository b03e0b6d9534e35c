from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.nn.augment import augment


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(seed=st.integers(0, 10_000), channels=st.sampled_from([1, 3]), width=st.integers(8, 24))
def test_views_are_pictures_of_the_same_size(seed: int, channels: int, width: int):
    pixels = torch.rand(2, channels, 16, width, generator=generator(seed))
    view = augment(pixels, generator(seed))
    assert view.shape == pixels.shape
    assert view.min() >= 0
    assert view.max() <= 1
    assert torch.isfinite(view).all()


def test_the_draw_is_the_generators_and_shared_by_the_batch():
    pixels = torch.rand(1, 3, 32, 32, generator=generator(0)).expand(2, -1, -1, -1)
    view = augment(pixels, generator(1))
    assert torch.equal(view, augment(pixels, generator(1)))
    assert not torch.allclose(view, augment(pixels, generator(2)), atol=0.02)
    # The same picture twice differs by the pixel noise alone (sd 0.005 each).
    difference = (view[0] - view[1]).std()
    assert 0.003 < difference < 0.009


def test_values_beyond_the_range_are_clipped_first():
    pixels = 3 * torch.randn(1, 3, 16, 16, generator=generator(0))
    assert torch.equal(augment(pixels, generator(3)), augment(pixels.clamp(0, 1), generator(3)))


def centroid(image: torch.Tensor) -> tuple[float, float]:
    mass = image - image.min()
    y, x = torch.meshgrid(*(torch.arange(float(n)) for n in image.shape), indexing="ij")
    return (mass * y).sum().item() / mass.sum().item(), (mass * x).sum().item() / mass.sum().item()


def test_poses_span_the_ranges_of_the_method():
    # A centred dot only shifts: by at most 1/16 of the doubled side, 8 of 64, either way.
    pixels = torch.full((1, 1, 64, 64), 0.2)
    pixels[..., 30:34, 30:34] = 0.9
    shifts = []
    for seed in range(150):
        view = augment(pixels, generator(seed))[0, 0]
        y, x = centroid(torch.where(view > (view.max() + view.median()) / 2, view, view.median()))
        shifts.append((y - 31.5, x - 31.5))
    found = torch.tensor(shifts).abs().amax(0)
    assert (found > 6).all()
    assert (found < 9.5).all()


def test_brightness_spans_the_ranges_of_the_method():
    # On a flat grey picture only brightness and gamma change anything.
    pixels = torch.full((1, 1, 16, 16), 0.5)
    means = torch.stack([augment(pixels, generator(seed)).mean() for seed in range(300)])
    lowest, highest = (0.6 * 0.5) ** 1.3, 1.4 * 0.5**0.7  # the extreme orders
    assert lowest - 0.02 < means.min() < 0.33
    assert 0.7 < means.max() < highest + 0.02


def test_other_channel_counts_are_refused():
    with pytest.raises(ValueError, match="1 or 3 channels, not 4"):
        augment(torch.rand(1, 4, 8, 8), generator(0))
