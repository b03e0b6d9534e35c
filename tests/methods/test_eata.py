from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from helpers.reference import LR, OBJECTIVES, Plain, ln_c
from helpers.trials import assert_same

SOURCE = images(11, 99)


def fisher(plain: Plain, batch: int = 4) -> list[Tensor]:
    """Mean over batches of the squared gradient of the batch's mean pseudo-label loss."""
    total = [torch.zeros_like(p) for p in plain.parameters]
    pieces = SOURCE.double().split(batch)
    for x in pieces:
        z = plain.model(x)
        loss = -z.log_softmax(1)[torch.arange(len(x)), z.argmax(1)].mean()
        total = [t + g**2 / len(pieces) for t, g in zip(total, plain.gradient(loss), strict=True)]
    return total


@pytest.mark.parametrize("objective", ["entropy", "come"])
@pytest.mark.parametrize("weight", [2000.0, 0.0])
def test_several_steps_agree_with_plain_autograd(weight: float, objective: str) -> None:
    margin, share = 0.9, {"entropy": 0.6, "come": 0.82}[objective]
    plain = Plain(small_vit().double())  # the steps are large: float32 would drift apart
    importance = fisher(plain)
    adapter = moetta.adapt(
        small_vit().double(),
        "eata",
        lr=LR,
        e0=share,
        margin=margin,
        source=SOURCE.double() if weight else None,
        fisher_batch=4,
        fisher_weight=weight,
        objective=objective,
    )
    if weight:
        for name, mine in zip(plain.names, importance, strict=True):
            theirs = adapter.running[f"fisher.{name}"]
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-9)
    average, chosen, redundant = None, 0, 0
    for seed in range(8):
        x = images(16, seed).double()
        z = plain.model(x)
        h, p, e0 = OBJECTIVES[objective](z), z.detach().softmax(1), share * ln_c(z)
        reliable = keep = h.detach() < e0
        if average is not None:
            cosine = (p @ average) / (p.norm(dim=1) * average.norm())
            keep = reliable & (cosine.abs() < margin)
        redundant += int((reliable & ~keep).sum())
        logits = adapter(x)
        torch.testing.assert_close(logits, z.detach(), rtol=1e-5, atol=1e-5)
        assert adapter.last is not None
        assert_same(adapter.last.selected, keep)
        assert adapter.last.backwards == int(keep.sum())
        chosen += int(keep.sum())
        if keep.any():
            mean = p[keep].mean(0)
            average = mean if average is None else 0.9 * average + 0.1 * mean
            kept = h[keep]
            loss = (torch.exp(e0 - kept.detach()) * kept).mean()
            for f, now, then in zip(importance, plain.parameters, plain.start, strict=True):
                loss = loss + weight * (f * (now - then) ** 2).sum()
            plain.step(plain.gradient(loss))
        plain.assert_agrees(adapter.state_dict())
        torch.testing.assert_close(adapter.running["probability"], average.float())
    assert adapter.totals.selected == chosen
    assert 0 < chosen < 8 * 16  # the filter had something to keep and something to drop
    assert redundant > 0


def test_the_number_of_source_images_is_limited() -> None:
    settings = {"fisher_batch": 4, "fisher_samples": 8}

    def fishers(source: object, **more: int) -> dict[str, Tensor]:
        return moetta.adapt(small_vit(), "eata", source=source, **settings, **more).state_dict()

    # Drawn at random from a tensor that is longer; an iterable gives its first ones.
    order = torch.randperm(len(SOURCE), generator=torch.Generator().manual_seed(3))
    drawn = fishers(SOURCE, seed=3)
    assert_same(drawn, fishers(SOURCE[order[:8]], seed=3))
    first = fishers(SOURCE[:8], seed=3)
    assert_same(first, fishers(SOURCE.split(4), seed=3))
    key = "running.fisher.norm.weight"
    assert not torch.equal(drawn[key], first[key])
    assert not torch.equal(drawn[key], fishers(SOURCE, seed=4)[key])
    # All of one that is not longer, in its own order.
    assert_same(first, fishers(SOURCE[:8], seed=4))


def test_nothing_selected_changes_nothing() -> None:
    adapter = moetta.adapt(small_vit(), "eata", source=SOURCE, lr=LR, e0=0.9, margin=2.0)
    adapter(images(8))
    adapter.config = type(adapter.config)(lr=LR, e0=1e-9)
    before = adapter.state_dict()
    adapter(images(8, 1))
    assert adapter.last is not None
    assert adapter.last.skipped == "no sample selected"
    after = adapter.state_dict()
    for key in before:
        if key.startswith(("param.", "optim.", "running.")):
            assert_same(before[key], after[key])


def test_reset_forgets_the_average_prediction() -> None:
    adapter = moetta.adapt(small_vit(), "eata", source=SOURCE, e0=1.5)
    adapter(images(8))
    assert adapter.running["probability"] is not None
    adapter.reset()
    assert adapter.running["probability"] is None
    assert adapter.running[adapter.from_source[0]] is not None


class Spare(nn.Module):
    """A model with a norm layer that its prediction does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = small_vit(), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_norm_layer_without_influence_is_harmless() -> None:
    adapter = moetta.adapt(Spare(), "eata", source=SOURCE, lr=LR, e0=1.5)
    assert adapter.running["fisher.spare.weight"].abs().sum() == 0
    adapter(images(8))
    assert F.mse_loss(adapter.network.spare.weight, torch.ones(4)) == 0


def test_source_images_beyond_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="source images give non-finite gradients"):
        moetta.adapt(small_vit(), "eata", source=SOURCE * 1e30)
