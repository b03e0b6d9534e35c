"""The user's model: shared, not copied; never touched unless asked; given back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import moetta
from helpers.models import FAMILIES, VIT, images, small_vit
from helpers.trials import LEARNS_NOTHING, METHODS, assert_same, eager, make, portrait
from moetta.core.surgery import Surgery

every = pytest.mark.parametrize("method", METHODS)


@every
def test_frozen_weights_share_memory_and_trained_ones_do_not(method: str) -> None:
    model = small_vit()
    original = {name: p.data_ptr() for name, p in model.named_parameters()}
    adapter = make(method, model=model)
    inside = {p.data_ptr() for p in adapter.network.parameters()}
    for name, pointer in original.items():
        assert (pointer in inside) == (name not in adapter.trained), name
    trained = {p.data_ptr() for p in adapter.trained.values()}
    assert not trained & set(original.values())


@every
def test_two_adapters_on_one_model_do_not_meet(method: str) -> None:
    model = small_vit()
    alone = make(method, model=small_vit())
    expected = [alone(images(4, seed)) for seed in range(2)]
    first, second = make(method, model=model), make(method, model=model)
    for seed in range(2):
        assert_same(first(images(4, seed)), expected[seed])
        second(images(4, seed + 7))


@pytest.mark.parametrize("family", ["timm_vit", "timm_resnet"])
@every
def test_a_failed_inplace_adaptation_leaves_no_trace(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family].model().train()
    before = portrait(model)
    adapter = moetta.list_methods()[method].adapter
    build = adapter.build

    def fail_at_the_end(self, source) -> None:
        build(self, source)
        with torch.no_grad():
            for parameter in self.trained.values():
                parameter.add_(1)
        raise MemoryError

    monkeypatch.setattr(adapter, "build", fail_at_the_end)
    with pytest.raises(MemoryError):
        make(method, FAMILIES[family], model, inplace=True)
    assert_same(before, portrait(model))


@every
def test_unwrap_without_inplace_is_the_untouched_original(method: str) -> None:
    model = VIT.model().train()
    before = portrait(model)
    adapter = make(method, model=model)
    adapter(images(4))
    assert adapter.unwrap() is model
    assert_same(before, portrait(model))
    adapter(images(4))  # a copy can go on


def test_unwrap_twice_is_unwrap_once() -> None:
    model = VIT.model()
    adapter = make("tent", model=model, inplace=True)
    adapter(images(4))
    assert adapter.unwrap() is adapter.unwrap() is model
    with pytest.raises(RuntimeError, match=r"make a new one with moetta.adapt\(\)"):
        adapter.merge()
    again = make("tent", model=model, inplace=True)  # and the model can be adapted anew
    assert_same(again(images(4)), make("tent")(images(4)))


def test_a_state_is_not_written_into_a_model_given_back(tmp_path: Path) -> None:
    model = VIT.model()
    adapter = make("tent", model=model, inplace=True)
    adapter(images(4))
    adapter.snapshot()
    adapter.save(tmp_path / "state")
    learnt = adapter.state_dict()
    adapter.unwrap()
    before = portrait(model)
    for restore in (
        adapter.reset,
        adapter.rollback,
        lambda: adapter.load(tmp_path / "state"),
        lambda: adapter.load_state_dict(learnt),
    ):
        with pytest.raises(RuntimeError, match="unwrapped"):
            restore()
        assert_same(before, portrait(model))


@every
def test_inplace_really_is_the_users_object(method: str) -> None:
    model = VIT.model()
    adapter = make(method, model=model, inplace=True)
    assert adapter.network is model
    mine = {id(p) for p in model.parameters()}
    apart = {name for name, p in adapter.trained.items() if id(p) not in mine}
    assert apart <= {"predictor"}  # stands beside the network


@pytest.mark.parametrize("inplace", [False, True])
def test_the_users_gradients_survive(inplace: bool) -> None:
    model = small_vit()
    model(images(2)).sum().backward()
    before = portrait(model)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    adapter = make("tent", model=model, inplace=inplace)
    adapter(images(4))
    adapter.unwrap()
    assert_same(before, portrait(model))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["tent", "moetta"])
def test_a_layer_of_two_names_is_replaced_under_both(method: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.first = nn.BatchNorm2d(4)
            self.second = self.first
            self.head = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(self.stem(x)).relu()).mean((2, 3)))

    model = Twice()
    adapter = moetta.adapt(
        model, method, inplace=True, **({"frozen": ""} if method == "moetta" else {})
    )
    assert model.first is model.second
    assert type(model.first) is not nn.BatchNorm2d
    adapter(images(4))
    adapter.unwrap()
    assert type(model.first) is nn.BatchNorm2d
    assert model.first is model.second


@every
def test_partly_frozen_models_adapt_alike(method: str) -> None:
    model = small_vit()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    frozen = make(method, model=model)
    free = make(method, model=small_vit())
    for seed in range(2):
        assert_same(frozen(images(4, seed)), free(images(4, seed)))
    assert_same(frozen.state_dict(), free.state_dict())


@every
def test_train_mode_with_dropout_is_switched_off(method: str) -> None:
    def build() -> nn.Module:
        model = small_vit()
        model.pos_drop = nn.Dropout(0.5)
        for block in model.blocks:
            block.drop_path1 = nn.Dropout(0.5)
        return model

    training, evaluating = make(method, model=build().train()), make(method, model=build().eval())
    for seed in range(2):
        assert_same(training(images(4, seed)), evaluating(images(4, seed)))


@pytest.mark.parametrize("inplace", [False, True])
def test_tied_weights_stay_tied_and_step_once(inplace: bool) -> None:
    model = small_vit()
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight
    before = portrait(model)
    weight = model.blocks[0].norm1.weight.detach().clone().requires_grad_()
    shared = {f"blocks.{i}.norm1.weight": weight for i in (0, 1)}
    p = torch.func.functional_call(model, shared, images(4)).softmax(1)
    (grad,) = torch.autograd.grad(-(p * p.log()).sum(1).mean(), weight)
    fingerprint = make("tent", model=model).fingerprint()
    adapter = make("tent", model=model, inplace=inplace)
    adapter(images(4))
    network = adapter.network
    assert network.blocks[1].norm1.weight is network.blocks[0].norm1.weight
    torch.testing.assert_close(network.blocks[0].norm1.weight.detach(), weight - 0.01 * grad)
    assert adapter.fingerprint() == fingerprint
    adapter.unwrap()
    assert_same(before, portrait(model))


def test_replace_and_undo() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)))
    inner, before = model[1][0], portrait(model)
    surgery = Surgery(model, inplace=True)
    surgery.replace("1.0", nn.Identity())
    assert isinstance(model[1][0], nn.Identity)
    assert surgery.undo() is model
    assert model[1][0] is inner
    assert_same(before, portrait(model))


def test_the_fingerprint_is_of_the_source_weights() -> None:
    adapter = make("tent")
    before = adapter.fingerprint()
    adapter(images(4))
    assert make("tent").fingerprint() == before
    for method in set(METHODS) - LEARNS_NOTHING:
        inplace = make(method, model=VIT.model(), inplace=True)
        inplace(images(4))
        assert inplace.fingerprint() == before
    assert make("tent", model=small_vit(seed=1)).fingerprint() != before
    half = small_vit().to(torch.float64)
    assert moetta.adapt(half, "tent", **eager("tent")).fingerprint() != before
