"""MoETTA against a straight-line re-computation from its definition, and the paper's numbers."""

import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

import moetta
from helpers.reference import OBJECTIVES
from moetta.methods.moetta import MoETTAConfig, default_frozen, indexed_norms
from moetta.nn.moe import MoELayerNorm, MoENorm, Routing, balance_loss

CLASSES = 7


def tiny_vit(seed=0):
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=CLASSES
    )
    nn.init.normal_(model.head.weight, std=1.0)
    return model.eval()


def images(batch=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 16, 16, generator=generator)


class StraightLine:
    """The method written out once more, with gather and autograd, for a timm ViT."""

    def __init__(self, model, adapter, frozen=(0,)):
        self.model, self.config = model, adapter.config
        self.names = [
            name
            for i, name in enumerate(
                n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)
            )
            if i not in frozen
        ]
        state = adapter.state_dict()
        self.values = {
            key.removeprefix("param."): value.double().requires_grad_()
            for key, value in state.items()
            if key.startswith("param.")
        }
        self.velocity = {}
        self.means = []
        self.past = {}
        self.model = model.double()

    def balance(self, name, p, k):
        """E sum_e F_e P_e, with F over the batch, or over the last choices for whole batches."""
        seen = k.tolist()
        if self.config.routing == "batch":
            if self.config.batch_balance == "constant":
                return p.new_ones(())
            self.past[name] = (self.past.get(name, []) + seen)[-self.config.window :]
            seen = self.past[name]
        share = F.one_hot(torch.tensor(seen).flatten(), p.shape[1]).double().mean(0)
        return p.shape[1] * (share * p.mean(0)).sum()

    def forward(self, x):
        balance, hooks, routes, config = [], [], {}, self.config

        def route(name, z):
            logits = z.mean(1) @ self.values[f"{name}.router.weight"].T
            logits = logits + self.values[f"{name}.router.bias"]
            if config.routing == "batch":
                logits = logits.mean(0, keepdim=True)
            p = logits.softmax(-1)
            k = p.argsort(-1, descending=True)[:, : config.top_k]
            balance.append(self.balance(name, p, k))
            return p, k

        def hook(name):
            def replace(module, args, _):
                (z,) = args
                leader = self.names[0] if config.router_scope == "model" else name
                if name == leader:
                    routes[name] = route(name, z)
                p, k = routes[leader]
                gamma, beta = module.weight, module.bias
                chosen = p[torch.arange(len(p))[:, None], k]
                for place in range(config.top_k):
                    c = chosen[:, place, None]
                    shared = config.top_k_weights == "share"
                    c = c / (chosen.sum(1, keepdim=True) if shared else c).detach()
                    c = c if config.router_grad else c.detach()
                    gamma = gamma + c * self.values[f"{name}.expert_weight"][k[:, place]]
                    beta = beta + c * self.values[f"{name}.expert_bias"][k[:, place]]
                mean, var = z.mean(-1, keepdim=True), z.var(-1, unbiased=False, keepdim=True)
                return (z - mean) / (var + module.eps).sqrt() * gamma[:, None] + beta[:, None]

            return replace

        for name in self.names:
            hooks.append(self.model.get_submodule(name).register_forward_hook(hook(name)))
        logits = self.model(x.double())
        for h in hooks:
            h.remove()
        return logits, sum(balance)

    def step(self, x):
        logits, balance = self.forward(x)
        h = OBJECTIVES[self.config.objective](logits)
        self.means.append(h.mean().item())
        average = sum(self.means) / len(self.means)
        kept = h <= average if self.config.select else torch.ones_like(h, dtype=torch.bool)
        e0 = self.config.e0 * math.log(CLASSES)
        weight = (e0 - h.detach()).exp() if self.config.reweight else torch.ones_like(h)
        loss = (weight * h)[kept].mean() + self.config.balance * average * balance
        grads = torch.autograd.grad(loss, list(self.values.values()), allow_unused=True)
        for (name, value), grad in zip(self.values.items(), grads, strict=True):
            grad = torch.zeros_like(value) if grad is None else grad
            if "expert_" in name:
                grad = grad + self.config.shared * sum(grad)
            before = self.velocity.get(name)
            self.velocity[name] = grad if before is None else self.config.momentum * before + grad
            with torch.no_grad():
                value -= self.config.lr * self.velocity[name]
        return logits.detach(), loss.item(), kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"select": False},
        {"reweight": False},
        {"balance": 0.0},
        {"router_grad": False},
        {"e0": 1.0},
        {"shared": 1.0},
        {"shared": 0.5, "top_k": 2},
        {"top_k": 2},
        {"top_k": 2, "top_k_weights": "one"},
        {"routing": "batch", "window": 3},
        {"routing": "batch", "batch_balance": "constant"},
        {"routing": "batch", "top_k": 2},
        {"objective": "come"},
        {"router_scope": "model"},
        {"router_scope": "model", "top_k": 2},
        {"router_scope": "model", "routing": "batch"},
    ],
    ids=str,
)
def test_five_steps_equal_the_straight_line(options):
    model = tiny_vit().double()
    adapter = moetta.adapt(model, "moetta", lr=0.05, experts=4, seed=3, **options)
    again = StraightLine(tiny_vit(), adapter)
    for t in range(5):
        x = images(seed=t).double()
        expected, loss, kept = again.step(x)
        logits = adapter(x)
        torch.testing.assert_close(logits, expected, atol=1e-8, rtol=1e-6)
        assert sum(adapter.last.losses.values()) == pytest.approx(loss)
        assert torch.equal(adapter.last.selected, kept)
        assert adapter.last.backwards == int(kept.sum())
    for name, value in again.values.items():
        torch.testing.assert_close(adapter.trained[name], value, atol=1e-9, rtol=1e-6)
    assert adapter.running["threshold"].item() == pytest.approx(sum(again.means) / 5)


OPTIONS = st.fixed_dictionaries(
    {
        "experts": st.integers(2, 12),
        "top_k": st.integers(1, 2),
        "routing": st.sampled_from(["sample", "batch"]),
        "router_scope": st.sampled_from(["layer", "model"]),
        "seed": st.integers(0, 1000),
        "balance": st.sampled_from([0.0, 0.2, 5.0]),
    }
)


@given(OPTIONS, st.integers(1, 9), st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=15)
def test_step_zero_is_the_source_model(options, size, seed, scale):
    model, x = tiny_vit(), images(size, seed) * scale
    logits = moetta.adapt(model, "moetta", **options)(x)
    torch.testing.assert_close(logits, model(x).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "count", "trained"),
    [
        ("vit_base_patch16_224", 24, 497_880),
        ("vit_large_patch16_224", 34, None),
        ("convnext_base", 32, None),
        ("vit_large_patch14_clip_224", 35, None),  # a ViT-L with a norm before its blocks
        ("efficientnet_b0", 48, None),  # 49 norm layers, and no ViT-L
    ],
)
def test_layers_and_parameters_of_the_papers_models(name, count, trained):
    with torch.device("meta"):
        model = timm.create_model(name)
    norms = indexed_norms(model)
    replaced = set(range(len(norms))) - default_frozen(model, len(norms))
    assert len(replaced) == count
    if trained is not None:
        widths = [norms[i].module.weight.numel() for i in replaced]
        assert sum(2 * 9 * d + 9 * d + 9 for d in widths) == trained


def test_activated_parameters_of_vit_base():
    model = timm.create_model("vit_base_patch16_224")
    assert moetta.adapt(model, "moetta").activated_parameters == 202_968
    adapter = moetta.adapt(model, "moetta", preset="potpourri")
    assert adapter.activated_parameters == 239_880
    assert (adapter.config.experts, adapter.config.balance) == (11, 0.5)
    nine = moetta.adapt(model, "moetta")
    assert sum(p.numel() for p in nine.trained.values()) == 497_880


def feed(adapter, entropies):
    """Drive the running values with given mean entropies."""
    seen = []
    for value in entropies:
        threshold, running = adapter._advance(torch.tensor(value, dtype=torch.float64))
        adapter.running |= running
        seen.append(threshold.item())
    return seen


MEANS = [0.94458, 0.84991, 0.85878, 0.81581, 0.95374, 1.02606]


def test_threshold_of_the_paper_is_the_running_mean():
    seen = feed(moetta.adapt(tiny_vit(), "moetta"), MEANS)
    assert seen == pytest.approx([sum(MEANS[: t + 1]) / (t + 1) for t in range(6)])


def test_threshold_of_the_released_code():
    seen = feed(moetta.adapt(tiny_vit(), "moetta", preset="released"), MEANS)
    assert seen == pytest.approx([0.94458, 0.89724, 0.89218, 0.87902, 0.90027, 0.92603], abs=2e-5)


def test_threshold_of_the_released_code_after_a_first_batch_that_was_sure():
    adapter = moetta.adapt(tiny_vit(), "moetta", preset="released")
    assert feed(adapter, [0.0, 0.0, 0.6, 0.3]) == pytest.approx(
        [0, 0, 0.2, 0.2 * 0.275 / (0.8 / 3)]
    )


def test_convnext_leaves_channels_first_norms_alone():
    model = ConvNeXt(depths=(1, 1, 3, 1), dims=(8, 8, 16, 16), num_classes=5)
    adapter = moetta.adapt(model, "moetta")
    replaced = [n for n, m in adapter.network.named_modules() if isinstance(m, MoENorm)]
    assert replaced == [
        f"stages.{s}.blocks.{b}.norm" for s, b in [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    ]


def test_convnexts_channels_first_norms_can_be_asked_for():
    model = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), num_classes=5).eval()
    x = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    few = moetta.adapt(model, "moetta", frozen="")
    every = moetta.adapt(model, "moetta", frozen="", channels_first=True)
    added = set(every.layers) - set(few.layers)
    between = {f"stages.{stage}.downsample.0" for stage in (1, 2, 3)}
    assert added == {"stem.1", "head.norm", *between}
    torch.testing.assert_close(every(x), model(x).detach(), atol=2e-6, rtol=1e-5)
    assert every.trained["stem.1.expert_bias"].abs().max() > 0


def test_convnext_with_only_channels_first_norms_uses_them():
    model = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), num_classes=5, conv_mlp=True)
    adapter = moetta.adapt(model, "moetta", lr=0.1)
    x = torch.randn(3, 3, 32, 32)
    first = adapter(x)
    assert not torch.equal(adapter(x), first)
    assert len(adapter.last.routing) == 8


def test_frozen_and_plain_by_index():
    adapter = moetta.adapt(tiny_vit(), "moetta", frozen="0-1,4", plain="2")
    kinds = {
        n: type(m)
        for n, m in adapter.network.named_modules()
        if isinstance(m, (nn.LayerNorm, MoENorm))
    }
    assert [n for n, kind in kinds.items() if kind is MoELayerNorm] == ["blocks.1.norm2"]
    plain = {n for n in adapter.trained if n.endswith("norm1.weight")}
    assert plain == {"blocks.1.norm1.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "0-9"}, "0-4"),
        ({"frozen": "x"}, "0-5,8"),
        ({"frozen": "0-1", "plain": "1"}, "both frozen and plain"),
        ({"frozen": "0-4"}, "freezes all 5 norm layers"),
        ({"top_k": 12}, "top_k must be between 1 and experts=9"),
        ({"routing": "token"}, "routing must be 'sample' or 'batch'"),
        ({"experts": 0}, "experts must be above 0"),
        ({"expert": 3}, "did you mean 'experts'"),
    ],
)
def test_refusals_name_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        moetta.adapt(tiny_vit(), "moetta", **options)


def test_backward_stops_at_the_first_layer_with_experts():
    adapter = moetta.adapt(tiny_vit(), "moetta", frozen="0-2")
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.shape) or t, lambda t: t
    )
    with hooks, torch.enable_grad():
        adapter.network.blocks[0](torch.randn(2, 5, 12))
    assert kept == []


def test_moe_off_equals_one_expert_without_balance():
    model = tiny_vit().double()
    one = moetta.adapt(model, "moetta", experts=1, balance=0.0, lr=0.05)
    off = moetta.adapt(model, "moetta", moe=False, lr=0.05)
    for t in range(5):
        x = images(seed=t).double()
        torch.testing.assert_close(one(x), off(x), atol=1e-9, rtol=1e-6)
    assert "balance" not in off.last.losses


def test_model_scope_has_one_router_and_one_choice():
    adapter = moetta.adapt(tiny_vit(), "moetta", router_scope="model", lr=0.05)
    assert [n for n in adapter.trained if n.endswith("router.weight")] == [
        "blocks.0.norm2.router.weight"
    ]
    adapter(images())
    first, *others = adapter.last.routing.values()
    assert all(torch.equal(first, other) for other in others)
    before = adapter.trained["blocks.0.norm2.router.weight"].clone()
    adapter(images(seed=1))
    assert not torch.equal(before, adapter.trained["blocks.0.norm2.router.weight"])


def test_batch_routing_balances_over_a_window_or_not_at_all():
    steady = moetta.adapt(tiny_vit(), "moetta", routing="batch", batch_balance="constant")
    steady(images())
    layers = len(steady.last.routing)
    expected = 0.2 * steady.running["threshold"].item() * layers
    assert steady.last.losses["balance"] == pytest.approx(expected)
    windowed = moetta.adapt(tiny_vit(), "moetta", routing="batch", window=3, lr=0.05)
    for t in range(5):
        windowed(images(seed=t))
        assert all(len(r.unique()) == 1 for r in windowed.last.routing.values())
    choices = windowed.running["choices"]
    assert choices.shape == (layers, 3, 1)
    assert (choices >= 0).all()


def test_balance_is_summed_over_layers_of_unequal_batch():
    # A model may fold windows into the batch of some layers.
    adapter = moetta.adapt(tiny_vit(), "moetta")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, 9, generator=generator).softmax(-1) for n in (6, 24, 6)]
    routings = [Routing(p, p.argmax(1, keepdim=True)) for p in drawn]
    total, _ = adapter._balance(routings)
    assert total.item() == pytest.approx(sum(balance_loss(r).item() for r in routings))


def test_layers_that_run_before_the_leading_router_are_told_of():
    class Backwards(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    model = Backwards(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8))
    adapter = moetta.adapt(model, "moetta", router_scope="model", frozen="")
    before = adapter.state_dict()
    with pytest.raises(ValueError, match='use router_scope="layer"'):
        adapter(torch.randn(4, 8))
    after = adapter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert adapter.last is None


def test_window_balance_counts_the_choices_made_so_far():
    adapter = moetta.adapt(tiny_vit(), "moetta", routing="batch", window=3, experts=2)
    p = torch.tensor([[0.75, 0.25]])
    for choice, share in [(0, 1), (1, 1 / 2), (0, 2 / 3), (1, 1 / 3)]:  # the fourth drops the first
        total, adapter.running["choices"] = adapter._balance([Routing(p, torch.tensor([[choice]]))])
        assert total.item() == pytest.approx(2 * (share * 0.75 + (1 - share) * 0.25))


def test_unselected_batch_moves_experts_by_nothing_but_balance():
    # A later batch whose every entropy is above the running mean: only the balance term is left.
    adapter = moetta.adapt(tiny_vit(), "moetta", balance=0.0, lr=0.1)
    adapter(images())
    adapter.running["entropy"] = adapter.running["threshold"] * 0
    adapter.running["batches"] = adapter.running["batches"] + 1000
    before = {k: v.clone() for k, v in adapter.trained.items()}
    adapter(images(seed=1))
    assert not adapter.last.selected.any()
    assert adapter.last.losses["entropy"] == 0
    assert adapter.last.backwards == 0
    assert adapter.last.skipped == "no sample selected"  # not by momentum either
    assert adapter.running["batches"] == 1002  # but it counts in the averages
    assert all(torch.equal(before[k], v) for k, v in adapter.trained.items())
    balanced = moetta.adapt(tiny_vit(), "moetta", lr=0.1, momentum=0.0)
    balanced(images())
    balanced.running["entropy"] = torch.tensor(0.1)
    balanced.running["batches"] = torch.tensor(1000.0)
    experts = {
        k: v.clone() for k, v in balanced.trained.items() if k.endswith("norm.expert_weight")
    }
    routers = {k: v.clone() for k, v in balanced.trained.items() if "router.weight" in k}
    balanced(images(seed=1))
    assert all(torch.equal(v, balanced.trained[k]) for k, v in experts.items())
    assert any(not torch.equal(v, balanced.trained[k]) for k, v in routers.items())


@given(OPTIONS, st.integers(0, 1000))
@settings(max_examples=10)
def test_the_balance_alone_moves_an_unselected_batch(options, seed):
    adapter = moetta.adapt(tiny_vit(), "moetta", lr=0.1, momentum=0.0, **options)
    adapter(images(seed=seed))
    adapter.running |= {"entropy": torch.tensor(0.0), "batches": torch.tensor(1e4)}
    before, x = {k: v.detach().clone() for k, v in adapter.trained.items()}, images(5, seed + 1)
    logits = adapter.network(x)
    log_p = logits.log_softmax(-1)
    threshold = -(log_p.exp() * log_p).sum(-1).detach().mean() / (1e4 + 1)
    total, _ = adapter._balance([layer.last for layer in adapter.layers.values()])
    pulls = torch.autograd.grad(
        options["balance"] * threshold * total, list(adapter.trained.values()), allow_unused=True
    )
    adapter(x)
    assert not adapter.last.selected.any()
    for (name, value), pull in zip(adapter.trained.items(), pulls, strict=True):
        if pull is None or not options["balance"]:
            assert torch.equal(value, before[name]), name
        else:
            torch.testing.assert_close(value, before[name] - 0.1 * pull, atol=1e-6, rtol=1e-4)


@given(order=st.permutations(range(6)))
@settings(max_examples=10, deadline=None)
def test_permuting_a_batch_permutes_its_logits(order):
    model = tiny_vit().double()
    plain, mixed = (moetta.adapt(model, "moetta", lr=0.05) for _ in range(2))
    for t in range(2):
        x = images(seed=t).double()
        torch.testing.assert_close(
            mixed(x[list(order)]), plain(x)[list(order)], atol=1e-9, rtol=1e-6
        )


def test_same_seed_same_routers_other_seed_others():
    a, b, c = (moetta.adapt(tiny_vit(), "moetta", seed=s) for s in (1, 1, 2))
    key = "norm.router.weight"
    assert torch.equal(a.trained[key], b.trained[key])
    assert not torch.equal(a.trained[key], c.trained[key])


def test_presets_are_what_they_say():
    assert MoETTAConfig.preset("paper") == MoETTAConfig()
    released = MoETTAConfig.preset("released")
    assert (released.threshold, released.experts, released.balance) == ("aliased", 9, 0.2)


def test_report_names_routing_by_layer():
    adapter = moetta.adapt(tiny_vit(), "moetta")
    adapter(images(6))
    assert list(adapter.last.routing) == [
        "blocks.0.norm2",
        "blocks.1.norm1",
        "blocks.1.norm2",
        "norm",
    ]
    assert all(r.shape == (6, 1) for r in adapter.last.routing.values())
    with adapter.paused():
        adapter(images(6))
    assert len(adapter.last.routing) == 4
    assert adapter.last.skipped == "paused"


def test_a_paused_report_has_a_row_a_sample_when_the_batch_goes_as_one():
    adapter = moetta.adapt(tiny_vit(), "moetta", routing="batch", top_k=2)
    adapter(images(6))
    learning = adapter.last.routing
    with adapter.paused():
        adapter(images(6))
    for routing in (learning, adapter.last.routing):
        assert [r.shape for r in routing.values()] == [(6, 2)] * 4


def test_merged_model_predicts_without_the_adapter():
    adapter = moetta.adapt(tiny_vit(), "moetta", lr=0.1)
    for t in range(3):
        adapter(images(seed=t))
    merged = adapter.merge()
    x = images(seed=9)
    with adapter.paused():
        expected = adapter(x)
    torch.testing.assert_close(merged(x), expected)
    adapter(x)
    torch.testing.assert_close(merged(x), expected)
