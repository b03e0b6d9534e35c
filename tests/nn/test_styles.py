from __future__ import annotations

import torch

from moetta.nn.styles import k_means


def test_k_means_finds_what_is_apart() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.cat((torch.randn(30, 4, generator=g) * 0.1, torch.randn(10, 4, generator=g) + 5))
    centres, sizes = k_means(x, 2, seed=3)
    order = centres[:, 0].argsort()
    assert sizes[order].tolist() == [30, 10]
    torch.testing.assert_close(centres[order[0]], x[:30].mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(centres[order[1]], x[30:].mean(0), rtol=1e-4, atol=1e-4)
