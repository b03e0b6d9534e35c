"""The contract on one small model: reports, precision, compilation, checkpointing, properties."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moetta
from helpers.models import (
    CLASSES,
    FAMILIES,
    VIT,
    Encoder,
    Perceptron,
    call,
    enliven,
    images,
    perceptron,
    small_vit,
)
from helpers.trials import LEARNS_NOTHING, METHODS, assert_finite, assert_same, eager, learnt, make
from moetta.core.functional import entropy
from moetta.testing.evidence import difference

LEARNERS = [m for m in METHODS if m not in LEARNS_NOTHING]
every = pytest.mark.parametrize("method", METHODS)


@every
def test_a_report_says_what_was_done(method: str) -> None:
    adapter = make(method)
    logits = adapter(images(6))
    report = adapter.last
    assert report is not None
    assert report.samples == 6
    p = logits.softmax(1)
    torch.testing.assert_close(report.entropy, -(p * p.log()).sum(1), rtol=1e-4, atol=1e-5)
    assert report.forwards % 6 == 0
    passes = {"noadapt": 0, "sar": 2}.get(method, 1)  # SAR looks twice, at other samples maybe
    assert report.backwards <= 6 * passes
    assert (report.backwards > 0) == (report.skipped is None and method not in LEARNS_NOTHING)
    if report.selected is not None and passes == 1 and report.skipped is None:
        assert report.backwards == int(report.selected.sum())
    if report.selected is not None:
        assert report.selected.shape == (6,)
        assert report.selected.dtype == torch.bool
    assert all(math.isfinite(value) for value in report.losses.values())
    assert bool(report.losses) == (method not in LEARNS_NOTHING)
    for experts in report.routing.values():
        assert experts.shape[0] == 6
    for tensor in (report.entropy, report.selected, *report.routing.values()):
        assert tensor is None or not tensor.requires_grad


def test_a_repr_is_short_and_tells() -> None:
    adapter = make("tent")
    assert repr(adapter).startswith(
        "Tent(VisionTransformer, TentConfig(seed=0, reset=None, lr=0.01"
    )
    assert repr(adapter).endswith("steps=0, trained=160)")


def test_an_unfinished_method_says_so() -> None:
    class Unfinished(moetta.Adapter):
        pass

    with pytest.raises(TypeError, match="Unfinished does not define build"):
        Unfinished(small_vit(), moetta.Config())


# --- code paths -----------------------------------------------------------------------------------


@every
def test_bfloat16_autocast(method: str) -> None:
    adapter, plain = make(method), make(method)
    start = learnt(adapter)
    with torch.autocast("cpu", torch.bfloat16):
        first = adapter(images(4, 0))
        logits = [adapter(images(4, seed)) for seed in range(1, 4)]
        with adapter.paused():
            paused = adapter(images(4, 5))
    assert all(torch.isfinite(z).all() for z in logits)
    torch.testing.assert_close(first.float(), plain(images(4, 0)), rtol=0.1, atol=0.2)
    state = adapter.state_dict()
    assert_finite(state)
    assert all(state[k].dtype == torch.float32 for k in start)
    if method in LEARNERS:
        assert any(not torch.equal(start[k], state[k]) for k in start)
        # The weights that the step made are the ones the next prediction uses.
        adapter.reset()
        with torch.autocast("cpu", torch.bfloat16), adapter.paused():
            assert not torch.equal(adapter(images(4, 5)), paused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@every
def test_models_of_other_precisions(method: str, dtype: torch.dtype) -> None:
    model = small_vit().to(dtype)
    source = images(8, 101).to(dtype)
    coarse = dtype == torch.bfloat16 and method not in (*LEARNS_NOTHING, "moetta")
    with pytest.warns(match="round to nothing") if coarse else contextlib.nullcontext():
        adapter = moetta.adapt(model, method, source=source, **eager(method))
    for seed in range(2):
        assert torch.isfinite(adapter(images(4, seed).to(dtype))).all()
    assert_finite(adapter.state_dict())


@pytest.fixture
def compiled():
    """Compile with the backend that needs no compiler, and forget it afterwards."""
    dynamo = pytest.importorskip("torch._dynamo")
    if not dynamo.is_dynamo_supported():
        pytest.skip("torch.compile is not supported here")
    yield lambda model: torch.compile(model, backend="eager")
    dynamo.reset()


@pytest.mark.parametrize(
    ("method", "inplace"), [*((m, False) for m in METHODS), ("tent", True), ("moetta", True)]
)
def test_compiled_models(method: str, inplace: bool, compiled) -> None:
    wrapper = compiled(perceptron())
    plain = make(method, model=perceptron())
    adapter = make(method, model=wrapper, inplace=inplace)
    assert isinstance(adapter.model, type(wrapper))
    for seed in range(2):
        x = images(4, seed)
        torch.testing.assert_close(adapter(x), plain(x), rtol=1e-4, atol=1e-5)
    with adapter.paused(), plain.paused():
        torch.testing.assert_close(adapter(x), plain(x), rtol=1e-4, atol=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(adapter.state_dict()[key], value, rtol=1e-3, atol=1e-5)
    assert adapter.unwrap() is wrapper
    assert_same(wrapper.state_dict(), compiled(perceptron()).state_dict())


# Hugging Face's models checkpoint in training mode only, and adapters work in evaluation mode.
@pytest.mark.parametrize("family", ["timm_vit", "timm_convnext"])
@every
def test_gradient_checkpointing_changes_no_number(method: str, family: str) -> None:
    kind = FAMILIES[family]
    model = kind.model()
    model.set_grad_checkpointing(True)
    on, off = make(method, kind, model), make(method, kind)
    for seed in range(2):
        assert_same(call(on, kind.batch(4, seed)), call(off, kind.batch(4, seed)))
    for key, value in off.state_dict().items():
        torch.testing.assert_close(on.state_dict()[key], value, rtol=1e-5, atol=1e-6)


class Cut(Perceptron):
    """Its blocks run where no gradient comes through."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        if self.how == "no_grad":
            with torch.no_grad():
                tokens = self.blocks(tokens)
        else:
            tokens = checkpoint(self.blocks, tokens, use_reentrant=True)
        return self.head(tokens.mean(1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", ["no_grad", "reentrant"])
@pytest.mark.parametrize("method", ["tent", "sar", "deyo", "mgtta", "becotta", "moetta"])
def test_a_model_that_cuts_its_gradient_is_described(method: str, how: str) -> None:
    adapter = make(method, model=enliven(Cut(how)).eval())
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=r"carry no gradient.*use_reentrant=False"):
        adapter(images(4))
    assert_same(before, adapter.state_dict())


@pytest.mark.parametrize("padded", [False, True])
@every
def test_torchs_own_encoder_answers_alike_with_and_without_a_gradient(
    method: str, padded: bool
) -> None:
    # In evaluation mode it would compute whole layers from their norms' weights, past any expert.
    if padded and method == "deyo":
        pytest.skip("deyo takes images")
    family = FAMILIES["torch_encoder"]
    source = [images(8, 101)]
    batches: list[Any] = [(images(4, seed),) for seed in range(3)]
    model = family.model()
    if padded:
        model = enliven(Encoder(nn.Embedding(50, 16))).eval()
        words = torch.randint(0, 50, (3, 4, 6), generator=torch.Generator().manual_seed(0))
        padding = torch.arange(6) > torch.tensor([[5], [4], [3], [2]])
        batches = [{"x": x, "padding": padding} for x in words]
        source = batches[:1]
    adapter = moetta.adapt(model, method, source=source, inplace=True, **eager(method))
    for batch in batches:
        with adapter.paused():
            paused = call(adapter, batch)
            routing = adapter.last.routing
        torch.testing.assert_close(call(adapter, batch), paused, rtol=1e-4, atol=1e-5)
        assert_same(adapter.last.routing, routing)
    if method == "moetta":
        assert len(routing) == 3  # all norm layers but the first
    with adapter.paused():
        expected = call(adapter, batch)
    if method != "becotta":  # merges without noise
        torch.testing.assert_close(call(adapter.merge(), batch), expected, rtol=1e-4, atol=1e-5)
    adapter.unwrap()
    assert all(layer.activation_relu_or_gelu == 1 for layer in model.encoder.layers)
    assert model.encoder.use_nested_tensor


# --- properties -----------------------------------------------------------------------------------


def extreme(kind: str, scale: float, size: int, seed: int) -> Tensor:
    x = images(size, seed)
    if kind == "constant":
        x = torch.ones_like(x)
    elif kind == "half":  # one sample far away from the others
        return torch.cat((x, x[:1] * scale))
    elif kind == "spike":
        x = torch.zeros_like(x)
        x[0, 0, 0, 0] = 1
    return x * scale


@every
@settings(max_examples=12)
@given(
    kind=st.sampled_from(["normal", "constant", "spike", "half"]),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e8, 1e15, 1e25, 3e38 / 8]),
    size=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_no_finite_input_spoils_anything(
    method: str, kind: str, scale: float, size: int, seed: int
) -> None:
    x = extreme(kind, scale, size, seed)
    adapter = make(method)
    for batch in (x, images(4, 9)):
        with torch.no_grad():
            sane = torch.isfinite(VIT.shared()(batch)).all(1)
        logits = adapter(batch)
        # Where even the source model overflows there is nothing to say; elsewhere there is.
        assert torch.isfinite(logits[sane]).all()
        assert_finite(adapter.state_dict())
    assert sane.all()


@pytest.mark.parametrize("method", ["neo", "lame", "gain", "roid", "spa"])
def test_a_sample_that_overflows_does_not_spoil_its_neighbours(method: str) -> None:
    batch = images(4, 1)
    batch[2] *= 1e30
    adapter = make(method)
    logits = adapter(batch)
    assert torch.isfinite(logits[[0, 1, 3]]).all()
    assert_finite(adapter.state_dict())
    assert torch.isfinite(adapter(images(4, 2))).all()


@every
def test_a_batch_that_overflows_is_skipped(method: str) -> None:
    """Logits beyond numbers teach nothing, and what comes after is as if it had not been."""
    adapter, untouched = make(method), make(method)
    adapter(images(4) * 1e30)
    assert adapter.last is not None
    if method in LEARNERS:
        assert adapter.last.skipped
        assert adapter.last.backwards == 0
    before, after = untouched.state_dict(), adapter.state_dict()
    for key in before:
        if key != "counters":
            assert_same(before[key], after[key])
    assert {k for k in after if not k.startswith("loss.")} == before.keys()


# The noise in becotta's gates goes by a sample's position.
@pytest.mark.parametrize("method", [m for m in METHODS if m != "becotta"])
@settings(max_examples=6)
@given(order=st.permutations(range(6)), seed=st.integers(0, 5))
def test_permuting_a_batch_permutes_its_logits(method: str, order: list[int], seed: int) -> None:
    x = images(6, seed)
    changes = {"destroy": "occlusion"} if method == "deyo" else {}  # its shuffles go by position
    straight, mixed = make(method, **changes), make(method, **changes)
    logits, shuffled = straight(x), mixed(x[order])
    torch.testing.assert_close(shuffled, logits[order], rtol=1e-4, atol=1e-5)
    left, right = straight.state_dict(), mixed.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        # The generator of mgtta is nearly a sign: rounding of a gradient near zero may turn it.
        if method != "mgtta":
            torch.testing.assert_close(right[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["eata", "sar", "deyo", "becotta"])
@settings(max_examples=5)
@given(seed=st.integers(0, 50), size=st.integers(1, 5))
def test_an_unselected_batch_leaves_the_parameters(method: str, seed: int, size: int) -> None:
    nothing = {"filter_e0": 1e-9} if method == "deyo" else {"e0": 1e-9}
    adapter = make(method, **nothing)
    start = learnt(adapter)
    logits = adapter(images(size, seed))
    assert torch.isfinite(logits).all()
    assert_same(start, learnt(adapter))
    assert adapter.last is not None
    assert adapter.last.skipped
    assert adapter.totals.selected == 0


@every
@settings(max_examples=5)
@given(seed=st.integers(0, 100))
def test_reported_entropies_lie_between_zero_and_ln_c(method: str, seed: int) -> None:
    adapter = make(method)
    adapter(images(3, seed) * 10)
    assert adapter.last is not None
    assert (adapter.last.entropy >= 0).all()
    assert (adapter.last.entropy <= math.log(CLASSES) + 1e-5).all()


@every
def test_random_numbers_are_the_methods_own(method: str) -> None:
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        adapter = make(method)
        kept = torch.get_rng_state()
        runs.append([adapter(images(4, i)) for i in range(2)])
        assert torch.equal(kept, torch.get_rng_state())
    for left, right in zip(*runs, strict=True):
        assert_same(left, right)


# --- answering before learning, and threads -------------------------------------------------------


@every
def test_a_batch_is_answered_before_the_update(method: str) -> None:
    """At the callback the parameters are those of the prediction, and a failure stops the step."""
    adapter = make(method)
    adapter(images(4, 0))
    before, heard = learnt(adapter), []

    def answer(logits: Tensor) -> None:
        heard.append(logits.clone())
        assert_same(learnt(adapter), before)

    adapter.on_prediction = answer
    logits = adapter(images(4, 1))
    assert len(heard) == 1
    assert_same(heard[0], logits)
    assert adapter.last.skipped is None

    def fail(logits: Tensor) -> None:
        raise RuntimeError("the client has gone")

    adapter.on_prediction = fail
    before = adapter.state_dict()
    with pytest.raises(RuntimeError, match="the client has gone"):
        adapter(images(4, 2))
    assert_same(adapter.state_dict(), before)
    adapter.on_prediction = None
    assert torch.isfinite(adapter(images(4, 2))).all()


@pytest.mark.parametrize("predict", ["first", "perturbed"])
def test_sar_announces_the_logits_that_it_returns(predict: str) -> None:
    adapter = make("sar", predict=predict)
    heard = []
    adapter.on_prediction = heard.append
    logits = adapter(images(4))
    assert len(heard) == 1
    assert_same(heard[0], logits)


@pytest.mark.parametrize("method", ["becotta", "moetta"])
def test_routing_is_known_when_a_batch_is_answered(method: str) -> None:
    adapter = make(method)
    heard = []
    adapter.on_prediction = lambda logits: heard.append(adapter.routing(len(logits)))
    adapter(images(4))
    assert_same(heard[0], adapter.last.routing)
    assert adapter.expert_counts().keys() == heard[0].keys()
    with adapter.paused():
        adapter(images(4, 1))
    assert_same(heard[1], adapter.last.routing)


@every
def test_another_threads_snapshot_waits_for_the_step(method: str) -> None:
    """A state read during a step is the one before it or the one after it, never a mix."""
    adapter = make(method)
    adapter(images(4, 0))
    before, read = adapter.state_dict(), []
    reader = threading.Thread(target=lambda: read.append(adapter.state_dict()))

    def answer(logits: Tensor) -> None:
        reader.start()  # the step is under way
        reader.join(0.02)
        assert reader.is_alive(), "the state was read in the middle of a step"

    adapter.on_prediction = answer
    adapter(images(4, 1))
    reader.join()
    assert_same(read[0], adapter.state_dict())
    assert difference(read[0], before, "") is not None  # at least the counters


def test_a_reset_in_the_middle_of_traffic_is_whole() -> None:
    """Resets and snapshots from another thread fall between steps, whatever their timing."""
    adapter = make("moetta")
    replay = make("moetta")
    known = [replay.state_dict()]
    for _ in range(6):
        replay(images(4, 0))
        known.append(replay.state_dict())
    seen, stop = [], threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            seen.append(adapter.state_dict())
            adapter.reset()

    meddler = threading.Thread(target=meddle)
    meddler.start()
    for _ in range(30):
        adapter(images(4, 0))
    stop.set()
    meddler.join()
    assert len(seen) > 1
    for found in seen:  # every state is one that undisturbed steps pass through
        step = int(found["counters"][0])
        if step < len(known):
            assert_same(found, known[step])
    assert any(int(found["counters"][0]) < len(known) for found in seen)


# --- the base's own part of a step ----------------------------------------------------------------


class Scripted(moetta.NormAffineAdapter):
    """Says what a test wants of a batch."""

    says: dict[str, Any] = {}  # noqa: RUF012
    stepped = 0

    def objective(self, inputs) -> moetta.Objective:
        logits = self.predict(inputs)
        loss = {"entropy": entropy(logits).mean()}
        return moetta.Objective(logits, **{"losses": loss, **self.says})

    def after_step(self, objective: moetta.Objective) -> None:
        self.stepped += 1


@pytest.mark.parametrize(
    ("says", "skipped", "backwards", "forwards"),
    [
        ({}, None, 4, 4),
        ({"selected": torch.tensor([True, False, True, False])}, None, 2, 4),
        ({"selected": torch.zeros(4, dtype=torch.bool)}, "no sample selected", 0, 4),
        (
            {"selected": torch.zeros(4, dtype=torch.bool), "without_selection": True},
            None,
            0,
            4,
        ),
        ({"skipped": "not today", "forwards": 12}, "not today", 0, 12),
        ({"losses": {}}, None, 0, 4),
        ({"running": {"mean": torch.tensor(math.nan)}}, "non-finite loss or gradient", 0, 4),
    ],
)
def test_the_base_steps_counts_and_skips(
    says: dict[str, Any], skipped: str | None, backwards: int, forwards: int
) -> None:
    adapter = Scripted(small_vit(), moetta.SGDConfig())
    adapter.says = {"running": {"mean": torch.tensor(2.0)}, **says}
    start = learnt(adapter)
    adapter(images(4))
    report = adapter.last
    assert (report.skipped, report.backwards, report.forwards) == (skipped, backwards, forwards)
    moved = difference(learnt(adapter), start, "") is not None
    assert moved == (skipped is None and says.get("losses") != {})
    assert ("mean" in adapter.running) == (adapter.stepped == 1) == (skipped is None)


def test_an_objective_or_a_learn_must_be_defined() -> None:
    class Mute(moetta.NormAffineAdapter):
        pass

    with pytest.raises(TypeError, match="Mute defines neither objective"):
        Mute(small_vit(), moetta.SGDConfig())(images(2))
    with pytest.raises(TypeError, match="Config must extend SGDConfig"):
        Mute(small_vit(), moetta.Config())
