"""Merging states: what each replica weighs, and what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moetta
from helpers.models import small_vit
from moetta.serve.merge import Contribution, Tally, merge, rebase, why_not

LAYER = "blocks.0.norm1"
EXPERT, ROUTER = f"param.{LAYER}.expert_weight", f"param.{LAYER}.router.weight"
SCALE, MOMENTUM = "param.norm.weight", f"optim.{LAYER}.expert_weight.momentum_buffer"


def state(value: float, steps: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        EXPERT: torch.full((3, 2), value),
        ROUTER: torch.full((3, 2), value),
        SCALE: torch.full((2,), value),
        MOMENTUM: torch.full((3, 2), value),
        "running.entropy": torch.tensor(value),
        "running.batches": torch.tensor(steps),
        "counters": torch.tensor([steps, 10 * steps], dtype=torch.float64),
        "loss.entropy": torch.tensor(value, dtype=torch.float64),
    }


def part(value: float, images: float, experts: list[int], steps: float = 0.0) -> Contribution:
    return Contribution(state(value, steps), images, {LAYER: torch.tensor(experts)})


def test_replicas_weigh_by_their_images() -> None:
    merged = merge(state(0.0), [part(1.0, 30, [30, 0, 0]), part(4.0, 10, [0, 10, 0])])
    for key in (EXPERT, MOMENTUM, ROUTER, SCALE, "running.entropy"):
        assert torch.all(merged[key] == 1.75), key


def test_experts_may_weigh_by_their_images_and_everything_else_by_all_images() -> None:
    parts = [part(1.0, 30, [30, 0, 0]), part(4.0, 10, [0, 10, 0])]
    merged = merge(state(0.0), parts, "experts")
    for key in (EXPERT, MOMENTUM):
        assert torch.equal(merged[key][:, 0], torch.tensor([1.0, 4.0, 0.0]))
    mean = (30 * 1.0 + 10 * 4.0) / 40
    for key in (ROUTER, SCALE, "running.entropy"):
        assert torch.equal(merged[key], torch.full_like(merged[key], mean))


def test_an_expert_that_both_used_is_shared_by_use() -> None:
    merged = merge(state(0.0), [part(1.0, 10, [9, 1, 0]), part(2.0, 90, [1, 9, 0])], "experts")
    assert merged[EXPERT][:, 0].tolist() == pytest.approx([1.1, 1.9, 0.0])


def test_a_sum_goes_as_far_as_all_replicas_together() -> None:
    base = state(1.0)
    merged = merge(base, [part(1.5, 30, [30, 5, 0]), part(3.0, 10, [0, 10, 0])], "sum")
    assert merged[EXPERT][:, 0].tolist() == [3.5, 3.5, 1.0]  # nobody used the third
    assert merged[SCALE].tolist() == [3.5, 3.5]
    assert float(merged["running.entropy"]) == (30 * 1.5 + 10 * 3.0) / 40
    assert merged[MOMENTUM][:, 0].tolist() == pytest.approx([1.5, (5 * 1.5 + 10 * 3) / 15, 1.0])


def test_one_replica_alone_is_not_changed_by_merging() -> None:
    for how in ("sum", "experts", "images", "equal"):
        merged = merge(state(0.1), [part(0.3, 30, [30, 5, 1])], how)
        for key, value in state(0.3).items():
            assert torch.allclose(merged[key], value), (how, key)


def test_other_weights_for_comparison() -> None:
    parts = [part(1.0, 30, [30, 0, 0]), part(4.0, 10, [0, 10, 0])]
    assert torch.all(merge(state(0.0), parts, "equal")[EXPERT] == 2.5)


def test_counters_and_sums_add_up() -> None:
    base = state(1.0, steps=5)
    merged = merge(base, [part(2.0, 8, [8, 0, 0], steps=7), part(4.0, 8, [8, 0, 0], steps=6)])
    assert merged["counters"].tolist() == [8, 80]
    assert float(merged["running.batches"]) == 8
    assert float(merged["loss.entropy"]) == 1 + 1 + 3


def test_the_largest_step_count_of_an_optimiser() -> None:
    key = "optim.norm.weight.step"
    parts = [Contribution({key: torch.tensor(v)}, 1.0) for v in (3.0, 7.0)]
    assert float(merge({key: torch.tensor(2.0)}, parts)[key]) == 7


def test_who_learnt_nothing_has_no_say() -> None:
    merged = merge(state(0.0), [part(1.0, 8, [8, 0, 0]), part(100.0, 0, [0, 0, 0])])
    assert float(merged[SCALE][0]) == 1.0


def test_a_broken_replica_has_no_say() -> None:
    for bad in (float("nan"), float("inf")):
        merged = merge(state(0.0), [part(1.0, 8, [8, 0, 0]), part(bad, 800, [800, 0, 0])])
        assert float(merged[SCALE][0]) == 1.0
    alone = merge(state(3.0), [part(float("nan"), 8, [8, 0, 0])])
    assert float(alone[SCALE][0]) == 3.0


def test_a_base_without_momentum_takes_it_from_those_that_have_some() -> None:
    base = {k: v for k, v in state(0.0).items() if k != MOMENTUM}
    merged = merge(base, [part(1.0, 30, [30, 0, 0]), part(4.0, 10, [0, 10, 0])], "experts")
    assert merged[MOMENTUM][:2, 0].tolist() == [1.0, 4.0]


def test_what_nobody_sent_stays() -> None:
    part_of = Contribution({SCALE: torch.ones(2)}, 4.0)
    assert float(merge(state(5.0), [part_of])["running.entropy"]) == 5.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"param\.norm\.weight has different shapes"):
        merge(state(0.0), [Contribution({SCALE: torch.ones(3)}, 1.0)])


finite = st.floats(-100, 100, width=32)
counts = st.lists(st.integers(0, 50), min_size=3, max_size=3)


@given(value=finite, base=finite, several=st.lists(counts, min_size=1, max_size=4))
@settings(deadline=None)
def test_equal_states_merge_to_themselves(
    value: float, base: float, several: list[list[int]]
) -> None:
    parts = [part(value, max(1, sum(experts)), experts) for experts in several]
    merged = merge(state(base), parts, "experts")
    used = torch.tensor(several).sum(0) > 0
    assert torch.all(merged[EXPERT][used] == value)  # exactly
    assert torch.all(merged[EXPERT][~used] == base)
    assert torch.all(merged[SCALE] == value)


@given(values=st.lists(finite, min_size=2, max_size=4), data=st.data())
@settings(deadline=None)
def test_a_merge_is_between_its_parts_and_their_order_does_not_matter(
    values: list[float], data: st.DataObject
) -> None:
    parts = [part(v, data.draw(st.integers(1, 99)), data.draw(counts)) for v in values]
    merged, turned = merge(state(0.0), parts, "experts"), merge(state(0.0), parts[::-1], "experts")
    for key in (ROUTER, SCALE):
        assert min(values) - 1e-4 <= float(merged[key].min())
        assert float(merged[key].max()) <= max(values) + 1e-4
    for key, value in merged.items():
        assert torch.allclose(value, turned[key], rtol=1e-6, atol=1e-6), key


@given(values=st.lists(finite, min_size=1, max_size=4), base=finite, data=st.data())
@settings(deadline=None)
def test_a_sum_adds_every_change_whatever_the_order(
    values: list[float], base: float, data: st.DataObject
) -> None:
    parts = [part(v, data.draw(st.integers(1, 99)), data.draw(counts)) for v in values]
    merged, turned = merge(state(base), parts, "sum"), merge(state(base), parts[::-1], "sum")
    expected = base + sum(value - base for value in values)
    assert float(merged[SCALE][0]) == pytest.approx(expected, abs=1e-4, rel=1e-5)
    unused = torch.stack([p.experts[LAYER] for p in parts]).sum(0) == 0
    assert torch.all(merged[EXPERT][unused] == base)
    for key, value in merged.items():
        assert torch.allclose(value, turned[key], rtol=1e-5, atol=1e-4), key
    unchanged = merge(state(base), [part(base, 5, [5, 0, 0]) for _ in values])
    assert torch.all(unchanged[SCALE] == base)


def test_what_was_learnt_since_contributing_stays() -> None:
    merged, sent, now = state(10.0, steps=9), state(1.0, steps=2), state(1.5, steps=3)
    out = rebase(merged, sent, now)
    assert torch.all(out[SCALE] == 10.5)
    assert float(out["counters"][0]) == 10
    assert float(out["running.entropy"]) == 10.0
    assert torch.all(out[MOMENTUM] == 10.0)


def test_without_learning_in_between_the_merged_state_is_taken_as_it_is() -> None:
    merged, sent = state(0.1, steps=9), state(0.3, steps=2)
    out = rebase(merged, sent, sent)
    assert all(torch.equal(out[key], value) for key, value in merged.items())


@pytest.mark.parametrize(
    ("method", "config"),
    [("tent", {}), ("moetta", {"select": False, "balance": 0.0, "lr": 0.1, "experts": 3})],
)
def test_merging_after_every_update_is_what_one_server_does(
    method: str, config: dict[str, Any]
) -> None:
    model = small_vit()
    server = moetta.adapt(model, method, **config)
    replicas = [moetta.adapt(model, method, **config) for _ in range(2)]
    base = server.state_dict()
    for step in range(5):
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        server(images)
        parts = []
        for replica, share in zip(replicas, images.split([5, 3]), strict=True):
            replica(share)
            tally = Tally()
            assert replica.last is not None
            tally.add(replica.last, replica.expert_counts())
            parts.append(Contribution(replica.state_dict(), tally.images, tally.experts))
        base = merge(base, parts)
        for replica in replicas:
            replica.load_state_dict(base)
    moved = 0.0
    for name, value in server.trained.items():
        assert torch.allclose(base[f"param.{name}"], value, rtol=1e-4, atol=1e-6), name
        moved = max(moved, float((value.detach() - server._initial[f"param.{name}"]).abs().max()))
    assert moved > 1e-4


@pytest.mark.parametrize("method", ["tent", "moetta", "becotta", "sar"])
def test_two_real_replicas_merge_and_go_on(method: str) -> None:
    model = small_vit()
    replicas = [moetta.adapt(model, method) for _ in range(2)]
    base = replicas[0].state_dict()
    parts = []
    for seed, replica in enumerate(replicas):
        tally = Tally()
        for step in range(2):
            images = torch.randn(
                6, 3, 16, 16, generator=torch.Generator().manual_seed(7 * seed + step)
            )
            replica(images)
            assert replica.last is not None
            tally.add(replica.last, replica.expert_counts())
        assert tally.updates == 2 - replica.totals.skipped
        for layer, count in tally.experts.items():
            assert len(count) == replica.expert_counts()[layer]
        parts.append(Contribution(replica.state_dict(), tally.images, tally.experts))
    merged = merge(base, parts)
    for replica in replicas:
        replica.load_state_dict(merged)
        assert replica.steps == 4
        replica(torch.randn(6, 3, 16, 16))
    assert replicas[0].totals.samples == 4 * 6 + 6


def test_only_selected_images_count() -> None:
    adapter = moetta.adapt(small_vit(), "moetta")
    adapter(torch.randn(6, 3, 16, 16))
    tally, last = Tally(), adapter.last
    assert last is not None
    assert last.selected is not None
    tally.add(last, adapter.expert_counts())
    assert tally.images == int(last.selected.sum())
    assert all(int(count.sum()) == tally.images for count in tally.experts.values())


def test_methods_that_cannot_be_merged_say_why() -> None:
    model = small_vit()
    assert why_not(moetta.adapt(model, "moetta")) is None
    assert why_not(moetta.adapt(model, "tent")) is None
    assert "schedule" in str(why_not(moetta.adapt(model, "rdumb")))
    assert "not a mean" in str(why_not(moetta.adapt(model, "moetta", preset="released")))
    assert "'images' cannot be averaged" in str(
        why_not(moetta.adapt(model, "rotta", mean=(0.5,) * 3, std=(0.5,) * 3))
    )
