"""Destroyed pictures: the same pixels elsewhere, or the centre gone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.nn.destroy import occlude, shuffle_patches, shuffle_pixels


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.arange(batch * 3 * height * width, dtype=torch.float32).view(
        batch, 3, height, width
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_patches_are_moved_whole(batch: int, grid: int, rows: int, columns: int) -> None:
    x = numbered(batch, grid * rows, grid * columns)
    y = shuffle_patches(x, grid, generator())

    def patches(image: torch.Tensor) -> list:
        return [
            image[:, r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].tolist()
            for r in range(grid)
            for c in range(grid)
        ]

    for before, after in zip(x, y, strict=True):
        left, right = patches(before), patches(after)
        assert sorted(left) == sorted(right)


def test_each_image_is_shuffled_its_own_way_and_the_seed_decides() -> None:
    x = numbered(1, 16, 16).expand(6, -1, -1, -1)
    y = shuffle_patches(x, 4, generator())
    assert len({tuple(image.flatten().tolist()) for image in y}) == 6
    assert torch.equal(y, shuffle_patches(x, 4, generator()))
    assert not torch.equal(y, shuffle_patches(x, 4, generator(1)))


def test_every_order_of_patches_is_as_likely() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).expand(4000, 1, 2, 2)
    places = shuffle_patches(x, 2, generator())[:, 0, 0, 0]
    counts = torch.bincount(places.long(), minlength=4)
    # Four standard deviations around 1000.
    assert (counts - 1000).abs().max() < 4 * (4000 * 0.25 * 0.75) ** 0.5


def test_sides_that_the_grid_does_not_divide_are_resized_and_back() -> None:
    x = torch.full((2, 3, 18, 21), 2.5)
    y = shuffle_patches(x, 4, generator())
    assert y.shape == x.shape
    torch.testing.assert_close(y, x)
    with pytest.raises(ValueError, match="3 x 8 cannot be cut into 4 x 4"):
        shuffle_patches(torch.zeros(1, 3, 3, 8), 4, generator())


def test_pixels_move_alike_in_the_whole_batch() -> None:
    x = numbered(1, 4, 4).expand(3, -1, -1, -1)
    y = shuffle_pixels(x, generator())
    assert torch.equal(y[0], y[1])
    assert not torch.equal(y[0], x[0])
    for channel in range(3):
        assert sorted(y[0, channel].flatten().tolist()) == x[0, channel].flatten().tolist()
    # The channels of a pixel stay together.
    assert torch.equal(y[0, 1] - y[0, 0], x[0, 1] - x[0, 0])


def test_occlusion_covers_the_centre_with_the_mean_colour() -> None:
    x = torch.randn(2, 3, 224, 224)
    y = occlude(x, 0.5)
    expected = x.clone()
    for i in range(2):
        for c in range(3):
            expected[i, c, 56:168, 56:168] = x[i, c].mean()
    torch.testing.assert_close(y, expected)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 1))
def test_occlusion_fits_any_image(height: int, width: int, side: float) -> None:
    x = numbered(1, height, width)
    y = occlude(x, side)
    changed = (y != x).any(1).sum().item()
    assert changed <= round(height * side) * round(width * side)
    assert torch.equal(x, numbered(1, height, width))
