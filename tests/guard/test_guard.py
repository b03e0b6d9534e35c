"""The guard as an adapter: the same contract, every action, exact resume, a hostile stream."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moetta
from helpers.models import CLASSES, FAMILIES, VIT, call
from helpers.trials import METHODS, assert_same, make, portrait
from moetta.core.functional import entropy
from moetta.guard import Event, GuardReport
from moetta.guard.answer import weighted_mean
from moetta.guard.trust import TRUSTED

BATCH = 16
LR = 1e-4  # so low that a run of some dozen batches is a healthy one


def images(seed: int, size: int = BATCH) -> Tensor:
    return VIT.batch(size, seed)[0]


def guarded(method: str = "tent", **options) -> moetta.Guard:
    # Untrained models answer few classes surely, as if the traffic were narrow.
    options = {"cooldown": 2 * BATCH, "reweigh": False, **options}
    return moetta.Guard(make(method, lr=LR) if method != "noadapt" else make(method), **options)


def spoil(guard: moetta.Guard, size: float = 50.0) -> None:
    """Break the adapted model: one class for everything."""
    with torch.no_grad():
        for parameter in guard.adapter.trained.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=torch.manual_seed(0)))


def source_logits(batch: Tensor) -> Tensor:
    with torch.no_grad():
        return VIT.shared()(batch)


# --- it is an adapter ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_run_is_the_adapters_own(method: str):
    slow = {} if method == "noadapt" else {"lr": 1e-4}
    plain, guard = make(method, **slow), moetta.Guard(make(method, **slow))
    for seed in range(3):
        assert_same(guard(images(seed)), plain(images(seed)))
    assert isinstance(guard, moetta.Adapter)
    assert guard.steps == plain.steps == 3
    assert guard.totals.samples == plain.totals.samples
    assert guard.totals.forwards == plain.totals.forwards + 3 * BATCH  # the first looks are whole
    assert isinstance(guard.last, GuardReport)
    assert_same(guard.last.entropy, plain.last.entropy)
    assert guard.last.losses == plain.last.losses
    assert (guard.last.guard.mode, guard.last.guard.rate) == ("adapt", 1.0)
    assert {k: v for k, v in guard.state_dict().items() if not k.startswith("guard.")}.keys() == (
        plain.state_dict().keys()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_it_takes_every_family_of_models(name: str):
    family = FAMILIES[name]
    guard = moetta.Guard(make("tent", family))
    before = portrait(family.shared())
    for seed in range(2):
        assert call(guard, family.batch(4, seed)).shape == (4, CLASSES)
    assert_same(portrait(family.shared()), before)


def test_it_guards_adapters_only():
    with pytest.raises(TypeError, match="takes an adapter made by"):
        moetta.Guard(VIT.shared())
    with pytest.raises(TypeError, match="not Guard"):
        moetta.Guard(guarded())
    with pytest.raises(ValueError, match="did you mean 'tolerance'"):
        guarded(tolerence=0.1)
    with pytest.raises(
        ValueError, match="which inplace=True has changed; make the adapter without"
    ):
        moetta.Guard(make("tent", inplace=True))
    with pytest.raises(ValueError, match="share must be at most 1"):
        guarded(share=2.0)


def test_bad_input_changes_nothing():
    guard = guarded()
    guard(images(0))
    before = guard.state_dict()
    for bad in (images(0)[:0], images(0) * float("nan"), images(0)[:, :1]):
        with pytest.raises(ValueError, match=r"batch"):
            guard(bad)
    assert_same(guard.state_dict(), before)


def test_paused_predicts_and_changes_nothing_but_the_totals():
    guard = guarded()
    guard(images(0))
    before = guard.adapter.state_dict()
    looks = guard.watch.looks
    with guard.paused() as same:
        same(images(1))
    assert guard.last.skipped == "paused"
    assert guard.watch.looks == looks
    assert_same(
        {k: v for k, v in guard.adapter.state_dict().items() if k.startswith("param.")},
        {k: v for k, v in before.items() if k.startswith("param.")},
    )
    assert guard.totals.samples == 2 * BATCH


def test_answers_are_told_before_the_update_and_only_once():
    guard = guarded()
    told: list[Tensor] = []
    weights: list[Tensor] = []

    def listen(logits: Tensor) -> None:
        told.append(logits)
        weights.append(next(iter(guard.trained.values())).detach().clone())

    guard.on_prediction = listen
    start = next(iter(guard.trained.values())).detach().clone()
    returned = [guard(images(0))]
    assert_same(weights[0], start)
    with guard.paused():
        returned.append(guard(images(1)))
    spoil(guard)
    while guard.mode != "source":
        returned.append(guard(images(len(returned))))
    assert guard.last.guard.from_source
    returned.append(guard(images(9)))
    assert len(told) == len(returned)
    for mine, theirs in zip(told, returned, strict=True):
        assert_same(mine, theirs)


def test_reset_is_a_new_guard():
    guard = guarded()
    fresh = guard.state_dict()
    for seed in range(4):
        guard(images(seed))
    spoil(guard)
    for seed in range(4):
        guard(images(seed))
    guard.reset()
    assert_same(guard.state_dict(), fresh)
    assert guard.last is None
    assert not guard.events


def test_merge_keeps_what_was_learnt():
    guard = guarded()
    guard(images(0))
    merged = guard.merge()
    with guard.paused():
        torch.testing.assert_close(merged(images(1)), guard(images(1)))


# --- what it does -------------------------------------------------------------------------------


def until_event(guard: moetta.Guard, start: int = 100, most: int = 40) -> tuple[Event, Tensor, int]:
    for seed in range(start, start + most):
        logits = guard(images(seed))
        if guard.last.guard.event is not None:
            return guard.last.guard.event, logits, seed
    raise AssertionError("nothing happened")


def test_a_spoilt_model_is_rolled_back_and_held(caplog: pytest.LogCaptureFixture):
    guard = guarded()
    for seed in range(20):
        guard(images(seed))
    assert not guard.good_is_source
    good = {k: v.clone() for k, v in guard.good.items()}
    spoil(guard)
    with caplog.at_level(logging.WARNING, logger="moetta"):
        event, logits, seed = until_event(guard)
    assert event.action == "rollback"
    assert event.value >= event.threshold
    assert event.step == guard.steps
    assert f"rollback at step {event.step} because of {event.reason}" in caplog.text
    torch.testing.assert_close(logits, source_logits(images(seed)))  # in doubt: the source's answer
    assert guard.last.guard.from_source
    assert_same(guard.adapter.state_dict(), good)
    assert guard.mode == "hold"
    held = guard(images(1))
    assert guard.last.skipped == "guard: hold"
    with guard.adapter.paused():
        assert_same(guard.adapter(images(1)), held)
    assert guard.counts["rollback"] == guard.counts[f"rollback: {event.reason}"] == 1


def test_trouble_without_a_good_state_serves_the_source_model():
    guard = guarded(cooldown=3 * BATCH)
    spoil(guard)
    event, _, _ = until_event(guard)
    assert event.action == "reset"
    assert guard.mode == "source"
    steps = guard.steps
    torch.testing.assert_close(guard(images(5)), source_logits(images(5)))
    assert guard.last.forwards == BATCH  # the source model only
    assert guard.last.guard.from_source
    event, _, _ = until_event(guard)
    assert (event.action, guard.mode) == ("resume", "adapt")
    assert guard.steps - steps == 2  # with the batch in trouble, three of 16 images
    assert guard.rate == 0.25


def test_trouble_while_holding_goes_to_the_source_model():
    guard = guarded(cooldown=1000 * BATCH)
    for seed in range(20):
        guard(images(seed))
    spoil(guard)
    assert until_event(guard)[0].action == "rollback"
    spoil(guard)
    assert until_event(guard)[0].action == "reset"
    assert guard.mode == "source"
    assert_same(
        {k: v for k, v in guard.adapter.state_dict().items() if k.startswith("param.")},
        {k: v for k, v in make("tent", lr=LR).state_dict().items() if k.startswith("param.")},
    )


def test_each_trouble_waits_longer_and_learns_slower():
    guard = guarded()
    waits = []
    for _ in range(3):
        spoil(guard)
        until_event(guard)
        waits.append(guard.recovery.wait + BATCH)
        until_event(guard)
        assert guard.mode == "adapt"
    assert waits == [2 * BATCH, 8 * BATCH, 32 * BATCH]
    assert guard.rate == pytest.approx(1 / 64)


def test_a_lower_rate_is_a_lower_learning_rate():
    guard, slow = guarded(), make("tent", lr=LR / 4)
    guard.recovery.level = 1
    for seed in range(3):
        guard(images(seed))
        slow(images(seed))
    for mine, theirs in zip(guard.adapter.trained.values(), slow.trained.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_long_calm_raises_the_rate_again():
    guard = guarded("noadapt", cooldown=BATCH, backoff=2.0)
    guard.recovery.level, guard.recovery.wait = 1, 64 * BATCH
    for seed in range(64):
        guard(images(seed))
    assert guard.last.guard.event.action == "calm"
    assert (guard.recovery.level, guard.rate, guard.recovery.wait) == (0, 1.0, 0)


def test_non_finite_parameters_never_reach_an_answer():
    guard = guarded()
    guard(images(0))
    with torch.no_grad():
        next(iter(guard.adapter.trained.values())).fill_(float("nan"))
    logits = guard(images(1))
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, source_logits(images(1)))
    assert guard.events[-1].reason == "non-finite"
    assert torch.isfinite(guard(images(2))).all()


def test_the_further_parameters_are_from_the_source_the_less_they_are_trusted():
    guard = guarded(drift_limit=0.04)
    guard(images(0))
    assert guard.trust == 1 - guard.drift / 0.04
    with torch.no_grad():
        for parameter in guard.adapter.trained.values():
            parameter.mul_(1.03)
    guard(images(1))
    assert guard.last.guard.event is None
    assert guard.last.guard.weight == guard.trust == pytest.approx(0.25, abs=0.02)


def test_parameters_that_run_away_are_trouble():
    guard = guarded(drift_limit=0.001)
    with torch.no_grad():
        for parameter in guard.adapter.trained.values():
            parameter.mul_(1.01)
    guard(images(0))
    assert guard.events[-1].reason == "drift"
    assert guard.events[-1].value == pytest.approx(0.01, rel=0.2)


def test_its_cost_is_a_quarter_of_a_forward_pass_at_most():
    guard = guarded("noadapt", probation=64)
    for seed in range(4):
        guard(images(seed))
    before = guard.totals
    assert before.forwards == 2 * before.samples  # on probation
    for seed in range(8):
        guard(images(seed, 12))
    for seed in range(32):
        guard(images(seed, 1))
    samples = guard.totals.samples - before.samples
    forwards = guard.totals.forwards - before.forwards
    assert samples == 128
    assert samples < forwards <= 1.25 * samples


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 20, 24, 26, 33])
def test_it_resumes_exactly(cut: int, tmp_path: Path):
    """Through a rollback, a hold and a resumption; odd batch sizes leave looks half filled."""
    sizes = [12, 5, 16, 1]

    def steps(guard: moetta.Guard, start: int, stop: int) -> list[Tensor]:
        out = []
        for step in range(start, stop):
            if step == 22:
                spoil(guard)
            out.append(guard(images(step, sizes[step % 4])))
        return out

    whole = guarded()
    expected = steps(whole, 0, 45)
    assert whole.events
    first = guarded()
    steps(first, 0, cut)
    first.save(tmp_path / "guard.safetensors")
    second = guarded()
    second.load(tmp_path / "guard.safetensors")
    assert_same(first.state_dict(), second.state_dict())
    for mine, theirs in zip(steps(second, cut, 45), expected[cut:], strict=True):
        assert_same(mine, theirs)
    assert_same(second.state_dict(), whole.state_dict())
    assert list(second.events) == list(whole.events)
    assert (second.counts, second.totals) == (whole.counts, whole.totals)


def test_snapshot_and_rollback():
    guard = guarded()
    with pytest.raises(RuntimeError, match="no snapshot to roll back to"):
        guard.rollback()
    guard(images(0))
    guard.snapshot()
    before = guard.state_dict()
    guard(images(1))
    guard.rollback()
    assert_same(guard.state_dict(), before)


def test_foreign_states_are_refused(tmp_path: Path):
    guard = guarded()
    guard(images(0))
    before = guard.state_dict()
    with pytest.raises(ValueError, match="not saved by a guard"):
        guard.load_state_dict(guard.adapter.state_dict())
    guard.adapter.save(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="not saved by a guard"):
        guard.load(tmp_path / "plain.safetensors")
    guarded(tolerance=0.01).save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="saved for another guard"):
        guard.load(tmp_path / "other.safetensors")
    guarded("moetta").save(tmp_path / "moetta.safetensors")
    with pytest.raises(ValueError, match="saved for another method"):
        guard.load(tmp_path / "moetta.safetensors")
    broken = {k: v for k, v in before.items() if not k.startswith("param.")}
    with pytest.raises(ValueError, match="is missing"):
        guard.load_state_dict(broken)
    short = {**before, "guard.watch.detector.entropy": torch.zeros(2).double()}
    for damaged in (short, {k: v for k, v in before.items() if k != "guard.events"}):
        with pytest.raises(ValueError, match="incomplete or damaged"):
            guard.load_state_dict(damaged)
    assert_same(guard.state_dict(), before)


def test_memory_does_not_grow():
    guard = guarded("tent", cooldown=1)
    sizes = []
    for round_ in range(3):
        for seed in range(30):
            if seed % 10 == 0:
                spoil(guard)
            guard(images(100 * round_ + seed))
        state = guard.state_dict()
        assert len(state["guard.watch.traffic.pending"]) < BATCH
        apart = ("guard.events", "guard.watch.traffic.pending")
        sizes.append({k: v.shape for k, v in state.items() if k not in apart})
    assert sizes[2].items() <= sizes[1].items()  # a reset leaves no optimiser state
    assert len(guard.events) <= 100


# --- trust --------------------------------------------------------------------------------------


def test_answers_in_doubt_are_the_mean_of_both_models():
    """Its weight is the trust; every image has been looked at."""
    guard = guarded()
    shift = torch.zeros(CLASSES)

    class Shifted(torch.nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return VIT.shared()(batch) + shift

    guard.reference._model = Shifted()  # a source model that differs as much as is wanted
    guard(images(0))
    assert guard.last.guard.weight == 1
    seen = set()
    for seed in range(1, 40):
        shift[:] = 4 * torch.randn(CLASSES, generator=torch.manual_seed(seed))
        with torch.no_grad():
            source = VIT.shared()(images(seed)) + shift
        with guard.adapter.paused():
            adapted = guard.adapter(images(seed))
        logits = guard(images(seed))
        if guard.last.guard.event is not None:
            break
        weight = guard.last.guard.weight
        seen.add(weight < 1)
        if weight < 1:
            assert weight == guard.trust < TRUSTED
            expected = weighted_mean(source, adapted, weight, guard.watch.temperature)
            torch.testing.assert_close(logits, expected)
            assert_same(guard.last.entropy, entropy(logits))
        else:
            torch.testing.assert_close(logits, adapted)
    assert True in seen


def test_in_doubt_a_paused_guard_answers_with_the_mean_too():
    """A service answers small batches paused; they must be as safe as the others."""
    guard = guarded()
    guard(images(0))
    guard.watch.overruled.sums = torch.tensor([800.0, 1000.0, 900.0, 1000.0]).double()
    weight, looks = guard.trust, guard.watch.looks
    assert 0 < weight < TRUSTED
    told: list[Tensor] = []
    guard.on_prediction = told.append
    with guard.adapter.paused():
        adapted = guard.adapter(images(1))
    with guard.paused():
        logits = guard(images(1))
    assert_same(told[-1], logits)
    expected = weighted_mean(source_logits(images(1)), adapted, weight, guard.watch.temperature)
    torch.testing.assert_close(logits, expected)
    assert guard.last.guard.weight == weight
    assert guard.last.forwards == 2 * BATCH
    assert guard.watch.looks == looks
    guard.adapter.trained[next(iter(guard.adapter.trained))].data.fill_(float("nan"))
    with guard.paused():
        torch.testing.assert_close(guard(images(1)), source_logits(images(1)))


def test_a_state_in_doubt_is_not_kept_as_good():
    guard = guarded()
    guard(images(0))
    for trusted in (False, True):
        guard.watch.clear()
        guard.looks_since_good = 8
        if not trusted:  # as after overruling answers of all degrees of confidence
            guard.watch.overruled.sums = torch.tensor([900.0, 1000.0, 900.0, 1000.0]).double()
        assert guard.watch.calm
        assert (guard.trust >= TRUSTED) == trusted
        guard._keep_if_good()
        assert guard.good_is_source != trusted


# --- hostile streams ----------------------------------------------------------------------------


def bursts() -> list[tuple[Tensor, Tensor]]:
    """Digits of eight classes, sorted by class, then of all classes; most classes 72 times."""
    from moetta.data import embedded

    found = list(embedded.stream("classical", limit=7200))
    images, labels = (torch.cat([getattr(b, k) for b in found]) for k in ("images", "labels"))
    few = torch.cat([(labels == c).nonzero()[:, 0] for c in range(8)])
    order = torch.cat((few, torch.arange(len(labels) - 640, len(labels))))
    return list(zip(images[order].split(64), labels[order].split(64), strict=True))


@pytest.mark.parametrize("mode", ["adapt", "source"])
def test_traffic_of_few_classes_is_answered_knowing_that(mode: str, tmp_path: Path):
    """Better than the source model, without learning, as long as it lasts and whoever answers."""
    from moetta import zoo

    model = zoo.load("digits-vit")

    def new() -> moetta.Guard:
        guard = moetta.Guard(moetta.adapt(model, "tent", lr=1e-3))
        if mode == "source":
            guard._act("drift", 2.0, 1.0)
            guard.recovery.wait = 1_000_000
        return guard

    guard, stream = new(), bursts()
    right, skipped = [], []
    for number, (batch, labels) in enumerate(stream):
        with torch.no_grad():
            answers = torch.stack([model(batch).argmax(1), guard(batch).argmax(1)])
        right.append((answers == labels).double().mean(1))
        skipped.append(guard.last.skipped)
        if number == 5:
            guard.save(tmp_path / "guard.safetensors")
            guard = new()
            guard.load(tmp_path / "guard.safetensors")
    source, guarded_share = 100 * torch.stack(right).T
    few = len(stream) - 10
    assert guarded_share[3:few].mean() > source[3:few].mean() + 5
    assert guarded_share[few:].mean() > source[few:].mean() - 3
    if mode == "source":
        assert guarded_share[-1] == source[-1]
    else:
        assert set(skipped[3:few]) == {"guard: few classes"}
        assert skipped[-1] is None  # it learns again


def test_moetta_plus_is_left_to_learn():
    """Its offsets start at zero, so nothing but their layers tells whether they are far."""
    from moetta import zoo
    from moetta.data import embedded

    model = zoo.load("digits-vit")
    guard = moetta.Guard(
        moetta.adapt(model, "moetta_plus", **zoo.tuned("digits-vit", "moetta_plus"))
    )
    right = []
    for batch in embedded.stream("classical", limit=80 * 64):
        with torch.no_grad():
            answers = torch.stack([model(batch.images).argmax(1), guard(batch.images).argmax(1)])
        right.append((answers == batch.labels).double().mean(1))
    source, guarded_share = 100 * torch.stack(right[20:]).mean(0)
    assert not guard.counts
    assert 0.01 < guard.drift < 0.1
    assert guarded_share > source + 1


def test_few_classes_can_be_left_to_the_adapter():
    from moetta import zoo

    model = zoo.load("digits-vit")
    guard = moetta.Guard(moetta.adapt(model, "noadapt"), reweigh=False)
    for batch, _ in bursts()[:6]:
        with torch.no_grad():
            assert_same(guard(batch), model(batch))
    assert guard.watch.narrow


def test_a_paused_guard_does_not_know_the_traffic():
    """Nobody watches then, so what was known of it grows old."""
    from moetta import zoo

    model = zoo.load("digits-vit")
    guard = moetta.Guard(moetta.adapt(model, "noadapt"))
    for batch, _ in bursts()[:6]:
        with torch.no_grad():
            answer, source = guard(batch), model(batch)
    assert not torch.equal(answer, source)
    with torch.no_grad(), guard.paused():
        assert_same(guard(batch), source)


def test_a_rate_far_too_high_on_the_embedded_stream():
    """Plain Tent loses; guarded, it loses no more than until the alarm."""
    from moetta import zoo
    from moetta.data import embedded

    settings = {"lr": 60 * zoo.tuned("digits-vit", "tent")["lr"]}
    model = zoo.load("digits-vit")
    plain = moetta.adapt(model, "tent", **settings)
    guard = moetta.Guard(moetta.adapt(model, "tent", **settings))
    right = torch.zeros(3)
    for batch in embedded.stream("classical", limit=64 * 30):
        with torch.no_grad():
            answers = [model(batch.images), plain(batch.images), guard(batch.images)]
        right += torch.stack([(a.argmax(1) == batch.labels).float().sum() for a in answers])
    source, plain_share, guarded_share = (100 * right / (64 * 30)).tolist()
    assert plain_share < source - 5
    assert guarded_share > source - 2
    assert guard.counts["reset"] + guard.counts["rollback"] >= 1
    assert guard.events[0].step <= 10
