from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.cells import vit_b
from helpers.models import FAMILIES, call, images, small_vit
from moetta.nn.bottleneck import gate_noise


class Reference(nn.Module):
    """A tiny timm ViT with adapters, written out block by block from the definition."""

    def __init__(self, adapter: moetta.Adapter, model: nn.Module, top_k: int) -> None:
        super().__init__()
        self.vit = copy.deepcopy(model).requires_grad_(False)
        self.top_k = top_k
        self.p = nn.ParameterDict(
            {n.replace(".", "/"): p.detach().clone() for n, p in adapter.trained.items()}
        )

    def forward(self, x: Tensor, seed: int) -> Tensor:
        vit = self.vit
        x = vit._pos_embed(vit.patch_embed(x))
        for index, block in enumerate(vit.blocks):
            x = self.adapted(block(x), index, seed)
        return vit.forward_head(vit.norm(x))

    def adapted(self, x: Tensor, index: int, seed: int) -> Tensor:
        gates, down, down_bias, up, up_bias = (
            self.p[f"blocks/{index}/{k}"] for k in ("gates", "down", "down_bias", "up", "up_bias")
        )
        experts = len(down)
        clean, raw = (x @ gates[0]).split(experts, dim=-1)
        noise = gate_noise(clean.detach(), torch.tensor(seed), 2 * index)
        scores = (clean + noise * (torch.nn.functional.softplus(raw) + 0.01)).sum(1)
        rows = []
        for i, score in enumerate(scores):
            values, best = score.topk(self.top_k)
            low, high = values.min(), values.max()
            weights = torch.softmax((values - low) / (high - low + 1e-6), 0)
            total = x[i]
            for w, e in zip(weights, best.tolist(), strict=True):
                hidden = torch.nn.functional.gelu(x[i] @ down[e] + down_bias[e])
                total = total + w * (hidden @ up[e] + up_bias[e])
            rows.append(total)
        return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 3])
def test_steps_are_what_the_definition_says(top_k: int):
    model = small_vit(depth=3, classes=7)
    settings = {"lr": 0.02, "e0": 0.6, "top_k": top_k, "seed": 4}
    adapter = moetta.adapt(model, "becotta", **settings)
    reference = Reference(adapter, model, top_k)
    adam = torch.optim.Adam(reference.p.values(), lr=0.02, betas=(0.9, 0.999))
    chosen = []
    for step in range(5):
        x = images(8, step)
        z = reference(x, adapter.generator().initial_seed() % (1 << 62))
        H = -(z.softmax(1) * z.log_softmax(1)).sum(1)
        keep = H.lt(0.6 * math.log(7))
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-4, atol=1e-4)
        assert adapter.last is not None
        assert torch.equal(adapter.last.selected, keep)
        assert adapter.last.backwards == keep.sum()
        chosen.append(int(keep.sum()))
        if keep.any():
            adam.zero_grad()
            H[keep].mean().backward()
            for parameter in reference.p.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            adam.step()
    assert 0 < sum(chosen) < 40
    for name, parameter in adapter.trained.items():
        expected = reference.p[name.replace(".", "/")]
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-4)


def test_the_model_itself_is_not_trained():
    model = small_vit()
    adapter = moetta.adapt(model, "becotta", lr=0.1, e0=1.0)
    assert {n.rpartition(".")[2] for n in adapter.trained} == {
        *("gates", "down", "down_bias", "up", "up_bias")
    }
    for seed in range(2):
        adapter(images(4, seed))
    blocks = adapter.network.blocks
    for name, parameter in model.blocks.named_parameters():
        index, _, rest = name.partition(".")
        assert torch.equal(blocks[int(index)].block.get_parameter(rest), parameter)


def test_vit_b_activates_what_the_paper_says():
    assert moetta.adapt(vit_b(), "becotta").activated_parameters == 138_252
    more = moetta.adapt(small_vit(depth=3), "becotta", top_k=2, rank=3, routers=4)
    assert more.activated_parameters == 3 * (16 * 12 + 2 * (2 * 16 * 3 + 3 + 16))


def test_the_first_prediction_is_near_the_source_but_not_it():
    model = small_vit()
    x = images(8)
    difference = (moetta.adapt(model, "becotta")(x) - model(x)).abs().max()
    assert 0 < difference < 0.2


def test_the_gate_stays_at_its_start_with_one_expert_and_learns_with_two():
    for top_k, moves in ((1, False), (2, True)):
        adapter = moetta.adapt(small_vit(), "becotta", lr=0.05, e0=1.0, top_k=top_k)
        gates = {n: p.clone() for n, p in adapter.trained.items() if n.endswith("gates")}
        for seed in range(3):
            adapter(images(8, seed))
        assert any(not torch.equal(adapter.trained[n], g) for n, g in gates.items()) == moves


def test_nothing_selected_changes_nothing():
    adapter = moetta.adapt(small_vit(), "becotta", e0=1e-6)
    before = {n: p.clone() for n, p in adapter.trained.items()}
    adapter(images(4))
    assert adapter.last is not None
    assert adapter.last.skipped == "no sample selected"
    assert all(torch.equal(before[n], p) for n, p in adapter.trained.items())


def test_a_paused_prediction_is_the_one_that_learning_would_return():
    adapter = moetta.adapt(small_vit(), "becotta", lr=0.05, e0=1.0)
    adapter(images(4))
    with adapter.paused():
        paused = adapter(images(4, 1))
        assert adapter.last is not None
        routing = adapter.last.routing
    assert torch.equal(adapter(images(4, 1)), paused)
    assert routing.keys() == {"blocks.0", "blocks.1"}
    assert routing["blocks.0"].shape == (4, 1)


def test_noise_differs_between_steps_layers_and_seeds():
    def choices(seed: int) -> list[Tensor]:
        adapter = moetta.adapt(small_vit(), "becotta", e0=1e-6, seed=seed)
        out = []
        for _ in range(2):
            adapter(images(16))
            assert adapter.last is not None
            out += list(adapter.last.routing.values())
        return out

    first, second = choices(0), choices(1)
    assert all(torch.equal(a, b) for a, b in zip(first, choices(0), strict=True))
    assert not torch.equal(first[0], first[2]), "steps"
    assert not torch.equal(first[0], first[1]), "layers"
    assert not torch.equal(first[0], second[0]), "seeds"


def test_gradient_checkpointing_meets_the_same_noise():
    plain, checkpointed = small_vit(), small_vit()
    checkpointed.set_grad_checkpointing(True)
    settings = {"lr": 0.05, "e0": 1.0, "top_k": 2}
    a, b = (moetta.adapt(m, "becotta", **settings) for m in (plain, checkpointed))
    for seed in range(3):
        torch.testing.assert_close(a(images(4, seed)), b(images(4, seed)))


def test_merged_it_answers_without_chance():
    adapter = moetta.adapt(small_vit(), "becotta", lr=0.05, e0=1.0, routers=2)
    for seed in range(3):
        adapter(images(8, seed))
    merged, x = adapter.merge(), images(8, 7)
    order = torch.tensor([7, 2, 0, 1, 3, 6, 5, 4])
    torch.testing.assert_close(merged(x)[order], merged(x[order]))
    before = merged(x)
    adapter(x)
    assert torch.equal(merged(x), before)


def test_save_load_and_reset_go_on_bit_for_bit(tmp_path: Path):
    settings = {"lr": 0.05, "e0": 1.0, "top_k": 2, "routers": 2}
    adapter = moetta.adapt(small_vit(), "becotta", **settings)
    first = [adapter(images(4, seed)) for seed in range(3)]
    adapter.save(tmp_path / "state.safetensors")
    second = [adapter(images(4, seed)) for seed in range(3, 6)]
    fresh = moetta.adapt(small_vit(), "becotta", **settings)
    fresh.load(tmp_path / "state.safetensors")
    for seed, expected in zip(range(3, 6), second, strict=True):
        assert torch.equal(fresh(images(4, seed)), expected)
    fresh.reset()
    for seed, expected in enumerate(first):
        assert torch.equal(fresh(images(4, seed)), expected)


def test_in_place_it_can_be_taken_out_again():
    model = small_vit()
    x = images(4)
    before, names = model(x), list(model.state_dict())
    adapter = moetta.adapt(model, "becotta", lr=0.1, e0=1.0, inplace=True)
    adapter(x)
    assert not torch.equal(model(x), before)
    assert adapter.unwrap() is model
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", ["timm_convnext", "timm_swin", "hf_vit", "hf_bert"])
def test_a_batch_of_one_works_on_any_layout(name: str):
    family = FAMILIES[name]
    adapter = moetta.adapt(family.model(), "becotta", e0=1.0, lr=0.05)
    for size in (3, 1):
        assert torch.isfinite(call(adapter, family.batch(size))).all()
    assert any(p.any() for n, p in adapter.trained.items() if n.endswith("up_bias"))


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="no repeated blocks"):
        moetta.adapt(model, "becotta")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 7}, "top_k"),
        ({"experts": 0}, "experts"),
        ({"rank": 0}, "rank"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"e0": 0}, "e0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        moetta.adapt(small_vit(), "becotta", **wrong)
