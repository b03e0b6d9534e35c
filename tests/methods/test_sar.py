from __future__ import annotations

import re

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn

import moetta
from helpers.models import FAMILIES, images, small_vit
from helpers.reference import LR, OBJECTIVES, Plain, ln_c
from helpers.trials import assert_same
from moetta.methods import sar
from moetta.nn.norms import find_norms


def early(name: str) -> bool:
    return not re.search(r"layer4|blocks\.9|blocks\.10|blocks\.11|norm\.", name) and name != "norm"


class PlainSAR:
    """SAR, step by step."""

    def __init__(
        self,
        share: float,
        recover: float,
        released: bool,
        rho: float = 0.05,
        objective: str = "entropy",
    ) -> None:
        self.plain, self.entropies = Plain(small_vit(), early), OBJECTIVES[objective]
        self.share, self.recover, self.released, self.rho = share, recover, released, rho
        self.average: float | None = None
        self.counts = {"recoveries": 0, "second_empty": 0, "dropped": 0}

    def step(self, x: Tensor) -> tuple[Tensor, int, int]:
        plain = self.plain
        z1 = plain.model(x)
        h1, e0 = self.entropies(z1), self.share * ln_c(z1)
        first = h1.detach() < e0
        if not first.any():
            return z1.detach(), len(x), 0
        g = plain.gradient(h1[first].mean())
        length = torch.cat([t.flatten() for t in g]).norm() + 1e-12
        kept = [p.detach().clone() for p in plain.parameters]
        plain.set([p + self.rho * d / length for p, d in zip(plain.parameters, g, strict=True)])
        z2 = plain.model(x)
        h2 = self.entropies(z2)
        second = h2.detach() < e0
        if not self.released:
            self.counts["dropped"] += int((second & ~first).sum())
            second = second & first
        answer = (z2 if self.released else z1).detach()
        if not second.any():
            plain.set(kept)
            self.counts["second_empty"] += 1
            return answer, 2 * len(x), int(first.sum())
        loss = h2[second].mean()
        g2 = plain.gradient(loss)
        plain.set(kept)
        plain.step(g2)
        now = loss.item()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        if self.average < self.recover:
            self.counts["recoveries"] += 1
            plain.restart()
            self.average = None
        return answer, 2 * len(x), int(first.sum() + second.sum())


# Each case with the event that it was chosen for.
CASES = {
    "ordinary": (0.5, 0.2, 0.05, None, "entropy"),
    "recovers": (0.5, 0.55, 0.05, "recoveries", "entropy"),
    "second filter empty": (0.2, 0.2, 0.05, "second_empty", "entropy"),
    "second filter finds others": (0.5, 0.2, 2.0, "dropped", "entropy"),
    "with COME's objective": (0.8, 0.2, 0.05, None, "come"),
    "recovers with COME's objective": (0.8, 1.2, 0.05, "recoveries", "come"),
}


@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize("case", CASES)
def test_several_steps_agree_with_plain_autograd(preset: str, case: str) -> None:
    share, recover, rho, event, objective = CASES[case]
    mine = PlainSAR(share, recover, preset == "released", rho, objective)
    adapter = moetta.adapt(
        small_vit(),
        "sar",
        preset=preset,
        lr=LR,
        e0=share,
        recover_below=recover,
        rho=rho,
        objective=objective,
    )
    for seed, size in enumerate((8, 8, 8, 3, 1, 8, 8, 8)):
        x = images(size, seed)
        expected, forwards, backwards = mine.step(x)
        torch.testing.assert_close(adapter(x), expected, rtol=1e-4, atol=1e-5)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (forwards, backwards)
        mine.plain.assert_agrees(adapter.state_dict())
        average = adapter.running["average_loss"]
        assert (average is None) == (mine.average is None)
        if average is not None:
            assert average.item() == pytest.approx(mine.average, rel=1e-4)
    assert adapter.totals.backwards > 0
    if event and preset == "paper":
        assert mine.counts[event] > 0


def test_a_recovery_starts_from_nothing() -> None:
    """The average is cleared, so the next step does not recover again; so is the momentum."""
    adapter = moetta.adapt(small_vit(), "sar", lr=LR, e0=1.5, recover_below=100.0)
    initial = adapter.state_dict()
    adapter(images(8))  # the first loss is below 100: recovered at once
    after = adapter.state_dict()
    assert after.keys() == initial.keys() | {"loss.entropy", "loss.sharp"}
    for key in initial:
        if key != "counters":
            assert_same(initial[key], after[key])
    assert adapter.totals.steps == 1  # the counters go on
    # Judged anew, from the next loss alone and not from the old low average.
    adapter.config = type(adapter.config)(lr=LR, e0=1.5, recover_below=0.0)
    adapter(images(8, 1))
    fresh = moetta.adapt(small_vit(), "sar", lr=LR, e0=1.5, recover_below=0.0)
    fresh(images(8, 1))
    for key, value in fresh.state_dict().items():
        if key.startswith(("param.", "optim.", "running.")):
            assert_same(value, adapter.state_dict()[key])


def test_a_collapse_is_recovered_from_once() -> None:
    """One low loss after high ones pulls the average under the threshold; the next step is free."""
    mine = PlainSAR(1.5, 0.0, released=False)
    losses = []
    for seed in range(4):
        mine.average = None
        mine.step(images(8, seed))
        losses.append(mine.average)
    recover = losses[0] + 1e-3  # the first step recovers
    adapter = moetta.adapt(small_vit(), "sar", lr=LR, e0=1.5, recover_below=recover)
    adapter(images(8, 0))
    assert adapter.running["average_loss"] is None
    high = max(range(1, 4), key=lambda i: losses[i])
    assert losses[high] > recover
    adapter(images(8, high))
    assert adapter.running["average_loss"] is not None


def test_nothing_selected_changes_nothing() -> None:
    adapter = moetta.adapt(small_vit(), "sar", e0=1e-6)
    before = adapter.state_dict()
    logits = adapter(images(4))
    torch.testing.assert_close(logits, small_vit()(images(4)).detach())
    assert adapter.last is not None
    assert adapter.last.skipped == "no sample selected"
    assert (adapter.last.forwards, adapter.last.backwards) == (4, 0)
    for key in before:
        if key.startswith(("param.", "optim.", "running.")):
            assert_same(before[key], adapter.state_dict()[key])


def test_a_model_of_excluded_layers_only_is_described() -> None:
    model = small_vit()
    for block in model.blocks:
        block.norm1 = block.norm2 = torch.nn.Identity()
    with pytest.raises(ValueError, match="sar excludes every norm layer of this model: norm"):
        moetta.adapt(model, "sar")


def test_late_blocks_are_left_out() -> None:
    adapter = moetta.adapt(small_vit(depth=12), "sar")
    assert len(adapter.trained) == 2 * 18
    assert not any(name.startswith(("blocks.9", "blocks.1.1", "norm")) for name in adapter.trained)


def blocks_of(name: str, depth: int) -> nn.Module:
    if name == "torchvision":
        return torchvision.models.VisionTransformer(16, 8, depth, 2, 8, 16, num_classes=5)
    if name == "torch":
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, depth, nn.LayerNorm(8)))
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, num_hidden_layers=depth, image_size=16, patch_size=8)
    )


@pytest.mark.parametrize("name", ["torchvision", "huggingface", "torch"])
@pytest.mark.parametrize(("depth", "layers"), [(12, 18), (2, 4)])
def test_other_libraries_late_blocks_are_left_out_too(name: str, depth: int, layers: int) -> None:
    network = blocks_of(name, depth)
    norms = find_norms(network)
    assert len(norms) == 2 * depth + 1
    assert sar.early(network, norms) == norms[:layers]


def test_small_models_with_timms_names_keep_to_the_rule_by_name() -> None:
    network = FAMILIES["timm_convnext"].shared()  # too shallow for a name that is excluded
    norms = find_norms(network)
    assert sar.early(network, norms) == norms


def test_without_blocks_every_layer_is_early() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    norms = find_norms(network)
    assert sar.early(network, norms) == norms


def test_a_non_finite_second_gradient_is_told_from_an_empty_selection(monkeypatch):
    adapter = moetta.adapt(small_vit(), "sar", e0=1.0)
    first = adapter.gradients
    found = []

    def once(loss):
        found.append(first(loss) if not found else None)
        return found[-1]

    monkeypatch.setattr(adapter, "gradients", once)
    before = adapter.state_dict()
    adapter(images(4))
    assert adapter.last.skipped == "non-finite loss or gradient at the perturbed weights"
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("param."))
