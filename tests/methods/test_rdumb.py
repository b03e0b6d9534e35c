"""RDumb against a straight-line re-computation: ETA, started over before every nth batch."""

from __future__ import annotations

import torch
from torch import Tensor

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain, entropies, ln_c


def test_several_steps_agree_with_plain_autograd() -> None:
    lr, every, margin, share = 0.05, 3, 0.9, 0.6
    plain = Plain(small_vit().double(), lr=lr)
    adapter = moetta.adapt(
        small_vit().double(), "rdumb", lr=lr, reset=every, margin=margin, e0=share
    )
    average: Tensor | None = None
    redundant = 0
    for turn in range(8):
        if turn % every == 0:
            plain.restart()
            average = None
        x = images(16, turn).double()
        z = plain.model(x)
        h, p, e0 = entropies(z), z.detach().softmax(1), share * ln_c(z)
        reliable = keep = h.detach() < e0
        if average is not None:
            cosine = (p @ average) / (p.norm(dim=1) * average.norm())
            keep = reliable & (cosine.abs() < margin)
        redundant += int((reliable & ~keep).sum())
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-5)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (16, int(keep.sum()))
        if keep.any():
            mean = p[keep].mean(0)
            average = mean if average is None else 0.9 * average + 0.1 * mean
            kept = h[keep]
            plain.step(plain.gradient((torch.exp(e0 - kept.detach()) * kept).mean()))
        plain.assert_agrees(adapter.state_dict())
    assert redundant > 0


def test_its_settings_are_the_papers() -> None:
    config = moetta.list_methods()["rdumb"].config()
    assert (config.lr, config.reset, config.fisher_weight) == (2.5e-4, 1000, 0)  # type: ignore[attr-defined]
    assert not config.needs_source
