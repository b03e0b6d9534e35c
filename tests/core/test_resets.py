from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain, entropies
from moetta.core.resets import ASR, ASRValues, concentration


def learnt(adapter: moetta.Adapter) -> dict[str, Tensor]:
    return {k: v for k, v in adapter.state_dict().items() if k.startswith("param.")}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[k], right[k]) for k in left)


def test_an_interval_starts_over_before_every_nth_batch() -> None:
    resetting = moetta.adapt(small_vit(), "tent", lr=0.05, reset=2)
    fresh = moetta.adapt(small_vit(), "tent", lr=0.05)
    for turn in range(5):
        if turn % 2 == 0:
            fresh.reset()
        torch.testing.assert_close(
            resetting(images(4, turn)), fresh(images(4, turn)), rtol=0, atol=0
        )
        assert same(learnt(resetting), learnt(fresh))
    assert resetting.totals.steps == 5  # the counters go on


def test_averages_and_momentum_are_forgotten_too() -> None:
    adapter = moetta.adapt(small_vit(), "eata", fisher_weight=0, e0=1.5, margin=2.0, reset=3)
    for turn in range(3):
        adapter(images(4, turn))
    assert adapter.state_dict()["running.probability"] is not None
    fresh = moetta.adapt(small_vit(), "eata", fisher_weight=0, e0=1.5, margin=2.0)
    assert torch.equal(adapter(images(4, 9)), fresh(images(4, 9)))
    mine, theirs = adapter.state_dict(), fresh.state_dict()
    for name in theirs:
        if name != "counters" and not name.startswith("loss."):
            assert torch.equal(mine[name], theirs[name]), name


def test_rdumb_is_eta_with_an_interval() -> None:
    rdumb = moetta.adapt(small_vit(), "rdumb", reset=2, e0=1.5, margin=2.0)
    eta = moetta.adapt(small_vit(), "eata", fisher_weight=0, lr=2.5e-4, reset=2, e0=1.5, margin=2.0)
    for turn in range(5):
        assert torch.equal(rdumb(images(4, turn)), eta(images(4, turn)))
    assert moetta.list_methods()["rdumb"].config().reset == 1000


def test_the_concentration_of_the_definition() -> None:
    four = 4 * torch.eye(4)
    assert concentration(four) == pytest.approx(1.386294, abs=1e-6)
    assert concentration(torch.tensor([[3.0, 1.0, 0.0, 0.0]])) == pytest.approx(0.672078, abs=1e-6)


def test_the_threshold_follows_as_in_the_definition() -> None:
    e, found = 0.0, []
    for _ in range(3):
        e = ASRValues(0.15, 5.0, 0.5, 0.5, 20.0).moved(e, 1.0, 0.5)
        found.append(e)
    assert found == pytest.approx([0.075, 0.144375, 0.208547], abs=1e-6)


@pytest.mark.parametrize(("slow", "batches"), [(0.91, 47), (0.41, 5)])
def test_on_a_steady_stream_the_threshold_is_a_timer(slow: float, batches: int) -> None:
    """From a gap of 4.4 to one of 0.05."""
    values, e = ASRValues(1.0, 0.0, 1.0, 1.0, 0.0), 0.0
    for _ in range(batches):
        e = values.moved(e, 4.4, slow)
    assert 4.4 - e == pytest.approx(0.05, abs=0.003)


def test_the_constants_are_the_authors() -> None:
    assert {
        "asr": ASRValues(0.99, 5, 0.005, 0.5, 50),
        "asr-resnet": ASRValues(0.15, 5, 0.5, 0.5, 20),
        "asr-roid": ASRValues(0.9, 5, 0.0005, 0.5, 0.1),
        "asr-ccc0": ASRValues(0.9995, 5, 0.005, 0.5, 0.1),
        "asr-roid-ccc0": ASRValues(0.999, 5, 0.0005, 0.5, 0.1),
        "asr-roid-ccc40": ASRValues(0.9, 5, 0.0005, 0.5, 20),
    } == ASR


def test_how_many_tensors_stay() -> None:
    values = ASRValues(0.15, 5.0, 0.5, 0.5, 20.0)
    assert values.kept(0.01, 10) == 3
    assert values.kept(0.0, 10) == 5
    assert values.kept(1.0, 10) == 0


def test_several_batches_of_asr_agree_with_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tent under ASR, with constants that reset some tensors on the way."""
    values = ASRValues(follow=0.15, pull=5.0, start=0.9, keep=0.6, steepness=1.0)
    monkeypatch.setitem(ASR, "asr", values)
    lr = 0.2
    plain, source = Plain(small_vit().double(), lr=lr), small_vit().double().eval()
    adapter = moetta.adapt(small_vit().double(), "tent", lr=lr, reset="asr")
    count = len(plain.parameters)
    squares = [torch.zeros_like(p) for p in plain.parameters]
    sums = [torch.zeros_like(p) for p in plain.parameters]
    importance: list[Tensor] | None = None
    centre: list[Tensor] | None = None
    e, weight, n, resets, partial = None, 0.0, 0, 0, 0
    for turn in range(12):
        x = images(6, turn).double()
        z = plain.model(x)
        if e is None:
            e = math.log(values.start * z.shape[1])
        grads = plain.gradient(entropies(z).mean())
        squares = [s + g**2 for s, g in zip(squares, grads, strict=True)]
        sums = [s + p.detach() for s, p in zip(sums, plain.parameters, strict=True)]
        n += 1
        if importance is not None and centre is not None:
            grads = [
                g + 2 * weight * f * (p.detach() - c)
                for g, f, p, c in zip(grads, importance, plain.parameters, centre, strict=True)
            ]
        plain.step(grads)
        mean = z.detach().mean(0).softmax(0)
        h = float(-(mean * mean.log()).sum())
        with torch.no_grad():
            flip = float((z.argmax(1) != source(x).argmax(1)).double().mean())
        if h < e:
            resets += 1
            keep = max(values.keep - values.steepness * (e - h), 0)
            fresh = [s / n for s in squares], [s / n for s in sums]
            if importance is None or centre is None:
                importance, centre = fresh
            else:
                pairs = zip(importance, fresh[0], strict=True)
                importance = [0.9 * a + 0.1 * b for a, b in pairs]
                centre = [0.9 * a + 0.1 * b for a, b in zip(centre, fresh[1], strict=True)]
            stay = sum(i < round(keep * count, 9) for i in range(count))
            partial += 0 < stay < count
            plain.set(
                [
                    p.detach() if i < stay else s
                    for i, (p, s) in enumerate(zip(plain.parameters, plain.start, strict=True))
                ]
            )
            plain.velocity = None
            squares = [torch.zeros_like(p) for p in plain.parameters]
            sums = [torch.zeros_like(p) for p in plain.parameters]
            e, n = math.log(values.start * z.shape[1]), 0
        else:
            mu = values.follow * flip + 1 - values.follow
            e = mu * e + (1 - mu) * h
        weight = values.pull * flip**2
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-4, atol=1e-4)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (12, 6)
        state = adapter.state_dict()
        assert float(state["running.reset.threshold"]) == pytest.approx(e, abs=1e-5)
        for name, mine in zip(plain.names, plain.parameters, strict=True):
            torch.testing.assert_close(state[f"param.{name}"], mine.detach(), rtol=1e-4, atol=1e-4)
    assert resets > 1
    assert partial >= 1


def test_asr_resumes_to_the_bit() -> None:
    def make() -> moetta.Adapter:
        return moetta.adapt(small_vit(), "moetta", lr=0.05, reset="asr-resnet")

    whole, first, second = make(), make(), make()
    expected = [whole(images(4, turn)) for turn in range(6)]
    for turn in range(3):
        first(images(4, turn))
    second.load_state_dict(first.state_dict())
    for turn in range(3, 6):
        assert torch.equal(second(images(4, turn)), expected[turn])


@pytest.mark.parametrize("value", [0, -3, True, "arr", 1.5])
def test_what_is_not_a_policy_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="reset"):
        moetta.adapt(small_vit(), "tent", reset=value)


def test_asr_needs_something_to_reset() -> None:
    with pytest.raises(ValueError, match="neo trains nothing"):
        moetta.adapt(small_vit(), "neo", reset="asr")


def test_asr_with_roid_needs_its_prior_correction_off() -> None:
    with pytest.raises(ValueError, match='set prior="off" too'):
        moetta.adapt(small_vit(), "roid", reset="asr-roid")


def test_asr_resets_roids_model_and_leaves_its_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any batch lies below such a threshold, and nothing is kept.
    values = ASRValues(follow=0.9, pull=0.0, start=100.0, keep=0.0, steepness=0.0)
    monkeypatch.setitem(ASR, "asr-roid", values)
    adapter = moetta.adapt(
        small_vit(), "roid", lr=0.05, prior="off", reset="asr-roid", consistency=False
    )
    anchor = {name: value.clone() for name, value in adapter._source.items()}  # type: ignore[attr-defined]
    start = learnt(adapter)
    for turn in range(2):
        adapter(images(8, turn))
        assert adapter.last is not None
        assert adapter.last.skipped is None
        assert same(learnt(adapter), start)
        assert adapter.state_dict().get("running.probability") is None
    assert all(torch.equal(anchor[k], v) for k, v in adapter._source.items())  # type: ignore[attr-defined]


def test_a_full_reset_after_asr_is_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ASRValues(follow=0.15, pull=5.0, start=0.9, keep=0.6, steepness=1.0)
    monkeypatch.setitem(ASR, "asr", values)
    adapter = moetta.adapt(small_vit(), "tent", lr=0.2, reset="asr")
    start = adapter.state_dict()
    for turn in range(6):
        adapter(images(6, turn))
    assert "running.reset.importance.norm.weight" in adapter.state_dict()  # it did reset
    adapter.reset()
    after = adapter.state_dict()
    assert after.keys() == start.keys()
    assert all(torch.equal(after[name], start[name]) for name in start)


def test_older_results_stay_comparable() -> None:
    config = moetta.list_methods()["tent"].config
    assert "reset" not in config().to_dict()
    assert config.preset(reset=7).to_dict()["reset"] == 7
