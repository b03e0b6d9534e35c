"""The promises that every method keeps, one function each; its first line is the promise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter
from moetta.core.step_report import Totals
from moetta.methods.registry import Method
from moetta.testing.evidence import (
    Broken,
    difference,
    finite,
    learnt,
    portrait,
    require,
    same,
    trained,
)
from moetta.testing.models import CLASSES, Batch, Family, call, heads


@dataclass
class Trial:
    """One method on one family of models.

    Attributes:
        method: the method.
        family: the family of models.
        config: settings of the method.
    """

    method: Method
    family: Family
    config: dict[str, Any] = field(default_factory=dict)
    _plain: tuple[list[Tensor], dict[str, Tensor]] | None = None

    def make(
        self, model: nn.Module | None = None, inplace: bool = False, **changes: Any
    ) -> Adapter:
        """A fresh adapter, with source images if it needs any."""
        settings = self.method.config.preset(**{**self.config, **changes})
        source = None
        if settings.needs_source:
            batches = [self.family.batch(8, seed) for seed in (101, 102)]
            source = [b if isinstance(b, dict) else b[0] for b in batches]
        model = self.family.shared() if model is None else model
        return self.method.adapter(model, settings, source, inplace)

    def run(self, adapter: Adapter, seed: int = 0, size: int = 4) -> Tensor:
        """One call with a batch of this family."""
        return call(adapter, self.family.batch(size, seed))

    def plain(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Logits and final state of two ordinary steps, to compare others with."""
        if self._plain is None:
            adapter = self.make()
            self._plain = [self.run(adapter, seed) for seed in range(2)], adapter.state_dict()
        return self._plain

    def replays(self, adapter: Adapter, *modes: Callable[[], AbstractContextManager[Any]]) -> None:
        """Two steps of this adapter give what two ordinary steps give, to the bit."""
        logits, state = self.plain()
        for seed, mode in enumerate(modes or (nullcontext, nullcontext)):
            with mode():
                got = self.run(adapter, seed)
            same(got, logits[seed], f"the logits of step {seed + 1}")
            require(not got.is_inference(), "the logits are inference-mode tensors")
        same(adapter.state_dict(), state, "the state after two steps")


def reports(trial: Trial) -> None:
    """A call returns finite, detached logits [B, C], reports what it did, and adds up."""
    source = trial.family.shared()
    before = portrait(source)
    adapter = trial.make()
    start, moved = trained(adapter), False
    for seed in range(3):
        logits = trial.run(adapter, seed)
        shape = tuple(logits.shape)
        require(shape == (4, CLASSES), f"the logits are {shape}, not (4, {CLASSES})")
        require(bool(torch.isfinite(logits).all()), "the logits are not finite")
        require(not logits.requires_grad, "the logits still require a gradient")
        last = adapter.last
        if last is None:
            raise Broken("adapter.last is None after a call")
        require(last.samples == 4, f"last.samples is {last.samples} after a batch of 4")
        require(last.forwards >= 4, f"last.forwards is {last.forwards} for a batch of 4")
        require(
            last.entropy.shape == (4,), f"last.entropy is {tuple(last.entropy.shape)}, not (4,)"
        )
        for name, tensor in {"entropy": last.entropy, **last.routing}.items():
            require(not tensor.requires_grad, f"{name} in the report still requires a gradient")
        if last.selected is not None:
            kind = (tuple(last.selected.shape), last.selected.dtype)
            require(kind == ((4,), torch.bool), f"last.selected is {kind}, not a mask of 4")
        if last.skipped is not None:
            require(last.backwards == 0, f"a skipped batch has {last.backwards} backwards")
        moved |= last.backwards > 0
    finite(adapter)
    totals = adapter.totals
    counts = (totals.steps, totals.samples, adapter.steps)
    require(counts == (3, 12, 3), f"steps, samples and adapter.steps are {counts}, not (3, 12, 3)")
    if moved and adapter.trained:
        seen = difference(trained(adapter), start, "")
        require(seen is not None, "backwards are counted, but no trained parameter moved")
    same(portrait(source), before, "the user's model (inplace=False)")


def resets(trial: Trial) -> None:
    """reset() restores the state at construction to the bit, and so does rollback() a snapshot."""
    adapter = trial.make()
    initial = adapter.state_dict()
    trial.run(adapter, 5)
    adapter.snapshot()
    kept = adapter.state_dict()
    trial.run(adapter, 6)
    adapter.rollback()
    same(adapter.state_dict(), kept, "the state after rollback()")
    adapter.reset()
    same(adapter.state_dict(), initial, "the state after reset()")
    require(adapter.last is None, "adapter.last is not None after reset()")
    require(adapter.totals == Totals(), f"the totals after reset() are {adapter.totals}")
    trial.replays(adapter)


def resumes(trial: Trial) -> None:
    """A saved state, loaded into a fresh adapter, continues to the bit."""
    adapter = trial.make()
    trial.run(adapter, 0)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(Path(folder) / "state.safetensors")
        fresh = trial.make(trial.family.model())
        fresh.load(Path(folder) / "state.safetensors")
    same(fresh.state_dict(), adapter.state_dict(), "the state after load()")
    for seed in (1, 2):
        same(trial.run(fresh, seed), trial.run(adapter, seed), f"the logits {seed} steps later")
    same(fresh.state_dict(), adapter.state_dict(), "the state two steps later")


def refuses_bad_input(trial: Trial) -> None:
    """A bad batch raises ValueError and changes nothing."""
    adapter = trial.make()
    trial.run(adapter, 0)
    state, last = adapter.state_dict(), adapter.last
    for what, batch in _bad(trial.family).items():
        try:
            call(adapter, batch)
        except ValueError:
            pass
        except Exception as error:
            raise Broken(
                f"{what} raised {type(error).__name__}, not ValueError: {error}"
            ) from error
        else:
            raise Broken(f"{what} was accepted")
        same(adapter.state_dict(), state, f"the state after {what}")
        require(adapter.last is last, f"adapter.last changed with {what}")


def _bad(family: Family) -> dict[str, Batch]:
    def of(change: Callable[[Tensor], Tensor]) -> Batch:
        batch = family.batch(4, 3)
        if isinstance(batch, dict):
            return {k: change(v) for k, v in batch.items()}
        return (change(batch[0]),)

    bad = {"an empty batch": of(lambda t: t[:0])}
    if family.kind != "text":
        bad["a batch with NaN"] = of(lambda t: t.index_fill(0, torch.tensor([2]), torch.nan))
        bad["a batch with five channels"] = of(lambda t: t[:, :1].expand(-1, 5, -1, -1))
        bad["a batch of whole numbers"] = of(lambda t: t.to(torch.uint8))
    return bad


def takes_any_batch_size(trial: Trial) -> None:
    """Batches of one and short last batches are learnt from, or skipped, without harm."""
    adapter = trial.make()
    for seed, size in enumerate((1, 4, 3, 1)):
        logits = trial.run(adapter, seed, size)
        shape = tuple(logits.shape)
        require(shape == (size, CLASSES), f"a batch of {size} gave logits {shape}")
        require(bool(torch.isfinite(logits).all()), f"a batch of {size} gave non-finite logits")
        finite(adapter)


def leaves_skipped_batches(trial: Trial) -> None:
    """A batch that is skipped, with nothing selected or not finite, leaves the parameters alone."""
    adapter = trial.make()
    for seed in range(2):
        _step_and_compare(adapter, trial.family.batch(4, seed), "an ordinary batch")
    undecided = trial.family.model()
    with torch.no_grad():  # equal logits for every image: nothing is certain
        for head in heads(undecided):
            head.weight.zero_()
            head.bias.zero_()
    # With the defaults: the settings of the trials may be chosen to select every sample.
    needed = {k: v for k, v in trial.config.items() if k in ("mean", "std")}
    adapter = Trial(trial.method, trial.family, needed).make(undecided)
    _step_and_compare(adapter, trial.family.batch(4, 0), "a batch of undecided predictions")
    if trial.family.kind != "text":
        batch = trial.family.batch(4, 0)
        (key, images), *_ = batch.items() if isinstance(batch, dict) else [("", batch[0])]
        huge: Batch = {key: images * 1e30} if key else (images * 1e30,)
        _step_and_compare(trial.make(), huge, "a batch of huge values")


def _step_and_compare(adapter: Adapter, batch: Batch, what: str) -> None:
    before = trained(adapter)
    call(adapter, batch)
    finite(adapter)
    if adapter.last is not None and adapter.last.skipped is not None:
        same(trained(adapter), before, f"{what} was skipped, but the state")
        count = adapter.last.backwards
        require(count == 0, f"{what} was skipped, but last.backwards is {count}")


def ignores_grad_mode(trial: Trial) -> None:
    """Under no_grad and inference_mode it gives the same numbers as without."""
    with torch.inference_mode():
        adapter = trial.make()
    trial.replays(adapter, torch.no_grad, torch.inference_mode)
    with torch.inference_mode():
        adapter.snapshot()
        adapter.reset()
        trial.run(adapter, 0)
        adapter.rollback()
        trial.run(adapter, 1)
    finite(adapter)


def pauses(trial: Trial) -> None:
    """Within paused() it predicts the same every time and learns nothing."""
    adapter = trial.make()
    trial.run(adapter, 0)
    before = learnt(adapter)
    with adapter.paused():
        first, again = trial.run(adapter, 1), trial.run(adapter, 1)
        last = adapter.last
    require(last is not None and last.skipped == "paused", "last.skipped is not 'paused'")
    same(again, first, "the second paused prediction")
    same(learnt(adapter), before, "the state after a paused call")
    trial.run(adapter, 1)
    require(adapter.steps == 2, f"adapter.steps is {adapter.steps} after 2 steps and a pause")


def unwraps(trial: Trial) -> None:
    """unwrap() gives back the user's model as it was, also after inplace=True."""
    require(trial.make().unwrap() is trial.family.shared(), "unwrap() returned another object")
    model = trial.family.model().train()
    next(model.parameters()).requires_grad_(False)
    before = portrait(model)
    adapter = trial.make(model, inplace=True)
    trial.replays(adapter)
    require(adapter.unwrap() is model, "unwrap() returned another object")
    same(portrait(model), before, "the unwrapped model")
    try:
        trial.run(adapter)
    except RuntimeError:
        return
    raise Broken("the adapter still answers after unwrap() took its model away")


def merges(trial: Trial) -> None:
    """merge() returns a separate, frozen model and does not disturb the adapter."""
    adapter = trial.make()
    trial.run(adapter, 0)
    state, batch = adapter.state_dict(), trial.family.batch(4, 7)
    merged = adapter.merge()
    same(adapter.state_dict(), state, "the adapter's state after merge()")
    frozen = not any(p.requires_grad for p in merged.parameters())
    require(frozen, "the merged model has parameters that require gradients")
    with torch.no_grad():
        expected = call(merged, batch)
        trial.run(adapter, 1)
        same(call(merged, batch), expected, "the merged model's answer after the adapter went on")


def announces_predictions(trial: Trial) -> None:
    """on_prediction is called exactly once per call, with the logits that the call returns."""
    adapter = trial.make()
    heard: list[Tensor] = []
    adapter.on_prediction = heard.append
    modes: tuple[Callable[[], AbstractContextManager[Any]], ...]
    modes = (nullcontext, nullcontext, adapter.paused)
    for seed, mode in enumerate(modes):
        heard.clear()
        with mode():
            logits = trial.run(adapter, seed)
        require(len(heard) == 1, f"on_prediction was called {len(heard)} times in one call")
        require(not heard[0].requires_grad, "on_prediction got logits that require a gradient")
        same(heard[0], logits, "what on_prediction got, against what the call returned,")


def draws_its_own_numbers(trial: Trial) -> None:
    """Random draws depend on the seed and the step only, and leave torch's generator alone."""
    with _seeded(1):
        adapter = trial.make()
        before = torch.get_rng_state()
        first = [trial.run(adapter, seed) for seed in range(2)]
        untouched = torch.equal(before, torch.get_rng_state())
    require(untouched, "a call moved torch's global random generator")
    with _seeded(2):
        adapter = trial.make()
        for seed in range(2):
            same(trial.run(adapter, seed), first[seed], "the logits under another global seed")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def does_not_grow(trial: Trial) -> None:
    """The state after many steps is as large as after a few."""
    adapter = trial.make()
    # Momentum and averages begin with the first batch that is learnt from.
    for seed in range(12):
        trial.run(adapter, seed)
        if seed >= 2 and not (adapter.trained and adapter.totals.backwards == 0):
            break
    early = {k: tuple(v.shape) for k, v in adapter.state_dict().items()}
    learnt_before = adapter.totals.backwards > 0
    for seed in range(4):
        trial.run(adapter, seed)
    if learnt_before or adapter.totals.backwards == 0:
        late = {k: tuple(v.shape) for k, v in adapter.state_dict().items()}
        same(late, early, f"shapes after {adapter.steps} steps, against after {adapter.steps - 4}")


PROMISES: tuple[Callable[[Trial], None], ...] = (
    reports,
    resets,
    resumes,
    refuses_bad_input,
    takes_any_batch_size,
    leaves_skipped_batches,
    ignores_grad_mode,
    pauses,
    unwraps,
    merges,
    announces_predictions,
    draws_its_own_numbers,
    does_not_grow,
)
