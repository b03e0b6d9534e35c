"""A guard around an adapter: compares it with the source model and undoes harmful learning."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from os import PathLike
from typing import Any, Self

from torch import Tensor, nn

from moetta.core.adapter import Adapter
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.step_report import StepReport, Totals
from moetta.guard import state
from moetta.guard.answer import Answer, Trouble, finite, weighted_mean
from moetta.guard.config import GuardConfig
from moetta.guard.events import EVENTS_KEPT, Event, Findings, GuardReport, log
from moetta.guard.once import Once
from moetta.guard.recovery import Recovery
from moetta.guard.reference import Reference
from moetta.guard.sampler import Sampler
from moetta.guard.short_steps import shortened
from moetta.guard.trust import TRUSTED
from moetta.guard.watch import Watch

LOOKS_BETWEEN_SNAPSHOTS = 8


class Guard(Adapter):
    """An adapter that keeps another one from doing harm.

    It is called like the adapter it wraps, and reports, saves, loads and resets like it. On a
    sample of the traffic it asks the source model too, and compares. When the adapted model is
    found to be worse, it goes back to the last good state and holds that; if that was not enough,
    it goes back to the source model and serves that. After a wait it learns again, in shorter steps
    if the rate is to blame. Copies of one image in a batch are classified and learnt from once.

    ``steps``, ``totals`` and ``events`` keep counting through a rollback. Do not call the wrapped
    adapter directly while it is guarded.

    Args:
        adapter: the adapter to guard, in its current state.
        **options: fields of `GuardConfig`.

    Attributes:
        adapter: the wrapped adapter.
        options: the guard's options.
        events: the last decisions, oldest first, at most 100.
        counts: how often each action was taken, by "action" and by "action: reason".
        recovery: what is done about trouble: mode, rate and wait.
        watch: the detectors.
        good: the adapter's last good state.

    Example:
        >>> import timm, torch, moetta
        >>> model = timm.create_model("test_vit", num_classes=10)
        >>> guard = moetta.Guard(moetta.adapt(model, "tent"))
        >>> guard(torch.randn(4, 3, 160, 160)).shape
        torch.Size([4, 10])
        >>> guard.last.guard.mode
        'adapt'
    """

    def __init__(self, adapter: Adapter, **options: Any) -> None:
        # Not super().__init__(): the network is the wrapped adapter's.
        if not isinstance(adapter, Adapter) or isinstance(adapter, Guard):
            raise TypeError(
                f"Guard takes an adapter made by moetta.adapt(), not {type(adapter).__name__}"
            )
        if adapter.ranks is not None:
            raise ValueError(
                "Guard cannot run on several ranks: it compares the answers of single processes; "
                "guard an adapter without process_group, or use reset="
            )
        if adapter.surgery.inplace:
            raise ValueError(
                "Guard compares with the source model, which inplace=True has changed; make the "
                "adapter without it: frozen weights are shared, not copied"
            )
        self.adapter = adapter
        self.options = GuardConfig.preset(**options)
        self.reference = Reference(adapter)
        self.on_prediction: Callable[[Tensor], None] | None = adapter.on_prediction
        self._paused = False
        self._once = Once()  # copies in the present batch
        self._nothing_to_learn = ""  # from the present batch, and why
        self._snapshot: dict[str, Tensor] | None = None
        self._start_over()

    def _start_over(self) -> None:
        """Set everything the guard remembers to its initial value."""
        self.watch = self.new_watch()
        self.sampler = Sampler(self.options)
        self.recovery = Recovery(self.options)
        self.steps = 0
        self.totals = Totals()
        self.last: GuardReport | None = None
        self.counts: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.good = self.adapter.state_dict()
        self.good_is_source = True
        self.looks_since_good = 0
        self.drift = self.reference.drift()

    def new_watch(self) -> Watch:
        """Detectors that have seen nothing."""
        return Watch(self.options.sample, self.options.tolerance, self.options.interval)

    def __getattr__(self, name: str) -> Any:
        # Attributes of the wrapped adapter: model, network, config, trained, running, optimizer.
        if name == "adapter":
            raise AttributeError(name)
        return getattr(self.adapter, name)

    @property
    def mode(self) -> str:
        """What is done: "adapt", "hold" or "source"; see `Findings`."""
        return self.recovery.mode

    @property
    def rate(self) -> float:
        """The share of each learning step that is kept."""
        return self.recovery.rate

    @property
    def trust(self) -> float:
        """The weight of the adapted model's answers, from 0 to 1; the source model has the rest."""
        return max(0.0, min(self.watch.trust, 1 - self.drift / self.options.drift_limit))

    @property
    def activated_parameters(self) -> int:
        """Trained numbers that one sample's prediction uses."""
        return self.adapter.activated_parameters

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Experts of each sample in the adapter's last prediction, by layer."""
        kept = self._once.kept
        found = self.adapter.routing(samples if kept is None else len(kept))
        return {name: self._once.rows(experts) for name, experts in found.items()}

    def experts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The adapter's experts."""
        return self.adapter.experts()

    def expert_counts(self) -> dict[str, int]:
        """How many experts each of the adapter's routed layers has."""
        return self.adapter.expert_counts()

    # --- the call -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch, learn from it unless that does harm, and watch; returns logits.

        ``on_prediction`` gets these logits before the update, as with any adapter, but after the
        guard has looked at them.

        Raises:
            ValueError: the batch is empty, has non-finite values or does not fit the model. Nothing
                has changed then.
        """
        with self.lock:
            self.surgery.check_alive()
            inputs = Inputs.checked(args, kwargs)
            self._once = Once.of(inputs)
            inputs = self._once.select(inputs)
            if self._paused:
                logits, report, weight = (
                    self._source(inputs) if self.mode == "source" else self._unwatched(inputs)
                )
                self._publish(replace(report, skipped="paused"), None, weight)
                return self._once.rows(logits)
            event: Event | None = None
            if self.mode == "source":
                logits, report, weight = self._source(inputs)
            else:
                logits, report, weight, event = self._watched(inputs)
            self.steps += 1
            action = self.recovery.pass_time(report.samples)
            if action is not None:
                if action == "resume":
                    self._watch_anew()
                event = self._record("", action, self.rate, 1.0)
            self._publish(report, event, weight)
            return self._once.rows(logits)

    def _unwatched(self, inputs: Inputs) -> tuple[Tensor, StepReport, float]:
        """The adapter's answer, as far as it is trusted; nothing is concluded from it."""
        answers: list[Answer] = []

        def answer(logits: Tensor) -> None:
            weight = self.trust if finite(logits) else 0.0
            answers.append(self._weighted(inputs, logits, weight))
            self._answer(answers[0].logits)

        with self._listening(answer):
            self.adapter(*inputs.args, **inputs.kwargs)
        logits, weight, _, extra = answers[0]
        report = self.adapter.last
        assert report is not None
        if weight < 1:
            report = replace(report, entropy=entropy(logits), forwards=report.forwards + extra)
        return logits, report, weight

    def _source(self, inputs: Inputs) -> tuple[Tensor, StepReport, float]:
        """The source model's answer."""
        logits, size = self.reference.logits(inputs), len(inputs)
        if not self._paused and finite(logits) and not self.watch.tells_little(logits):
            self.watch.see(logits)
            logits = self._reweighed(logits)
        self._answer(logits)
        why = "guard: source model"
        return logits, StepReport(size, size, 0, entropy(logits), skipped=why), 0.0

    def _watched(self, inputs: Inputs) -> tuple[Tensor, StepReport, float, Event | None]:
        """The adapter's answer, checked between its prediction and its update."""
        checked: list[Answer] = []

        def look(logits: Tensor) -> None:
            checked.append(self._check(inputs, logits))
            self._answer(checked[0].logits)

        hold, self._nothing_to_learn = self.mode == "hold", ""
        learning = (
            self.adapter.paused()
            if hold
            else shortened(self.adapter, lambda: self._kept(len(inputs)))
        )
        with self._listening(look), learning:
            self.adapter(*inputs.args, **inputs.kwargs)
        logits, weight, trouble, extra = checked[0]
        report = self.adapter.last
        assert report is not None
        report = replace(report, forwards=report.forwards + extra)
        if why := "hold" if hold else self._nothing_to_learn:
            report = replace(report, skipped=f"guard: {why}")
        if weight < 1 or self._reweighs:
            report = replace(report, entropy=entropy(logits))
        if trouble is None and not all(map(finite, self.adapter.trained.values())):
            trouble = ("non-finite", math.nan, 0.0)
        if trouble is None:
            self._keep_if_good()
        return logits, report, weight, None if trouble is None else self._act(*trouble)

    @contextlib.contextmanager
    def _listening(self, callback: Callable[[Tensor], None]) -> Iterator[None]:
        """Within the block, the wrapped adapter passes its predictions to ``callback``."""
        before, self.adapter.on_prediction = self.adapter.on_prediction, callback
        try:
            yield
        finally:
            self.adapter.on_prediction = before

    def _answer(self, logits: Tensor) -> None:
        if self.on_prediction is not None:
            self.on_prediction(self._once.rows(logits))

    def _kept(self, size: int) -> float:
        """The share of the step on so many images that is kept."""
        if self._nothing_to_learn:
            return 0.0
        # Steps on fewer images than a look are shorter: the linear scaling rule of learning rates.
        # Without it one image moves the model as far as a batch of 64.
        return self.rate * min(1.0, size / self.options.sample)

    # --- watching -------------------------------------------------------------------------------

    def _check(self, inputs: Inputs, logits: Tensor) -> Answer:
        """Look at a sample of the batch, and answer as far as the adapted model is trusted."""
        if not finite(logits):
            return self._weighted(inputs, logits, 0.0, ("non-finite", math.nan, 0.0))
        closely = self.trust < TRUSTED or self._reweighs
        index = self.sampler.choose(len(inputs), self.steps, closely).to(logits.device)
        if len(index) == 0:
            return Answer(logits)
        source = self.reference.logits(inputs.select(index))
        blank = self.watch.tells_little(source)
        trouble = None if blank else self._trouble(source, logits[index])
        if blank or self._reweighs:
            self._nothing_to_learn = "blank images" if blank else "few classes"
        weight = 0.0 if trouble is not None else self.trust
        known = source[index.argsort()] if len(index) == len(inputs) else None
        answer = self._weighted(inputs, logits, weight, trouble, known)
        reweighed = answer.logits if blank else self._reweighed(answer.logits)
        return answer._replace(logits=reweighed, extra=answer.extra + len(index))

    @property
    def _reweighs(self) -> bool:
        """Whether classes are weighed by how frequent they are."""
        return self.options.reweigh and self.watch.narrow

    def _reweighed(self, logits: Tensor) -> Tensor:
        """An answer that knows how frequent each class is, in traffic of few classes."""
        return self.watch.informed(logits) if self.options.reweigh else logits

    def _weighted(
        self,
        inputs: Inputs,
        logits: Tensor,
        weight: float,
        trouble: Trouble | None = None,
        source: Tensor | None = None,
    ) -> Answer:
        """The adapted model's answer, or both models' if its weight is too small for that."""
        if weight >= TRUSTED:
            return Answer(logits)
        extra = 0
        if source is None:
            source, extra = self.reference.logits(inputs), len(inputs)
        mixed = weighted_mean(source, logits, weight, self.watch.temperature)
        return Answer(mixed, weight, trouble, extra)

    def _trouble(self, source: Tensor, adapted: Tensor) -> Trouble | None:
        """Take images that both models have classified; returns what is wrong, if anything."""
        looks = self.watch.looks
        name = self.watch.add(source, adapted)
        if self.watch.looks > looks:
            self.looks_since_good += self.watch.looks - looks
            self.drift = self.reference.drift()
            if self.mode == "adapt" and self.drift > self.options.drift_limit:
                return ("drift", self.drift, self.options.drift_limit)
        return None if name is None else (name, self.watch.levels[name], 1.0)

    def _keep_if_good(self) -> None:
        """Remember the current state if it is trusted and no detector holds evidence against it."""
        if self.mode != "adapt" or self.looks_since_good < LOOKS_BETWEEN_SNAPSHOTS:
            return
        if self.watch.calm and self.trust >= TRUSTED:
            self.good = self.adapter.state_dict()
            self.good_is_source = False
            self.looks_since_good = 0

    # --- acting ---------------------------------------------------------------------------------

    def _act(self, reason: str, value: float, threshold: float) -> Event:
        """Go back to the last good state or, if that was not enough, to the source model."""
        action = self.recovery.trouble(has_good_state=not self.good_is_source)
        if action == "rollback":
            self.adapter.load_state_dict(self.good)
        else:
            self.adapter.reset()
            self.good = self.adapter.state_dict()
            self.good_is_source = True
        self._watch_anew()
        return self._record(reason, action, value, threshold)

    def _watch_anew(self) -> None:
        """Forget the evidence, and look closely for a while."""
        self.watch.clear()
        self.sampler.restart()
        self.looks_since_good = 0
        self.drift = self.reference.drift()

    def _record(self, reason: str, action: str, value: float, threshold: float) -> Event:
        event = Event(self.steps + (1 if reason else 0), reason, action, value, threshold)
        self.events.append(event)
        self.counts[action] += 1
        if reason:
            self.counts[f"{action}: {reason}"] += 1
        log(event, self.recovery.wait, self.rate)
        return event

    def _publish(self, report: StepReport, event: Event | None, weight: float) -> None:
        report = self._once.report(report)
        values = {f.name: getattr(report, f.name) for f in fields(StepReport)}
        findings = Findings(
            mode=self.mode,
            rate=self.rate,
            drift=self.drift,
            levels=self.watch.levels,
            look=self.watch.last,
            event=event,
            weight=weight,
        )
        self.last = GuardReport(**values, guard=findings)
        self.totals = self.totals.plus(self.last)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The adapter's state and the guard's, as tensors (copies)."""
        with self.lock:
            return state.collect(self)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Restore a `state_dict`, bit for bit.

        Raises:
            ValueError: it does not fit this guard or its adapter. Nothing has changed then.
            RuntimeError: the adapter was unwrapped.
        """
        with self.lock:
            state.restore(self, tensors)

    def reset(self) -> None:
        """Return the adapter, and all that the guard remembers, to the moment of construction."""
        with self.lock:
            self.adapter.reset()
            self._start_over()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically."""
        state.save(self, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the state from a file that `save` wrote for the same model and configuration.

        Raises:
            ValueError: the file is damaged, not a guard's, or saved for something else.
            RuntimeError: the adapter was unwrapped.
        """
        state.load(self, path)

    def save_source(self, path: str | PathLike[str]) -> None:
        """Write what the adapter computed from the source images."""
        self.adapter.save_source(path)

    @contextlib.contextmanager
    def paused(self) -> Iterator[Self]:
        """Within the block, predict without learning or watching."""
        before, self._paused = self._paused, True
        try:
            with self.adapter.paused():
                yield self
        finally:
            self._paused = before

    # --- leaving --------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A hash of the source model's weights."""
        return self.adapter.fingerprint()

    def unwrap(self) -> nn.Module:
        """The original model, as it was before adaptation."""
        return self.adapter.unwrap()

    def merge(self) -> nn.Module:
        """A plain model that keeps what was learnt and no longer adapts."""
        return self.adapter.merge()

    def __repr__(self) -> str:
        return f"Guard({self.adapter!r}, mode={self.mode!r}, events={sum(self.counts.values())})"
