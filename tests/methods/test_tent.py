from __future__ import annotations

import timm
import torch

import moetta
from helpers.models import images, small_vit
from helpers.reference import LR, Plain, entropies


def test_several_steps_agree_with_plain_autograd() -> None:
    plain = Plain(small_vit())
    adapter = moetta.adapt(small_vit(), "tent", lr=LR)
    for seed, size in enumerate((8, 8, 3, 1, 8)):
        x = images(size, seed)
        z = plain.model(x)
        loss = entropies(z).mean()
        plain.step(plain.gradient(loss))
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-6)
        assert adapter.last is not None
        assert abs(adapter.last.losses["entropy"] - loss.item()) < 1e-6
        torch.testing.assert_close(adapter.last.entropy, entropies(z).detach())
        assert (adapter.last.forwards, adapter.last.backwards) == (size, size)
        plain.assert_agrees(adapter.state_dict())


def test_the_defaults_are_used() -> None:
    plain = Plain(small_vit(), lr=5e-4)
    adapter = moetta.adapt(small_vit(), "tent")
    for seed in range(2):
        plain.step(plain.gradient(entropies(plain.model(images(8, seed))).mean()))
        adapter(images(8, seed))
    plain.assert_agrees(adapter.state_dict())


def test_activated_parameters_are_the_papers() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    assert moetta.adapt(model, "tent").activated_parameters == 38_400
    assert moetta.adapt(model, "deyo").activated_parameters == 38_400
    assert moetta.adapt(model, "eata", fisher_weight=0).activated_parameters == 38_400
    assert moetta.adapt(model, "sar").activated_parameters == 27_648
    assert moetta.adapt(model, "cotta").activated_parameters == 86_415_592
