"""A guard around an adapter: compares it with the source model and undoes harmful learning."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Self

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from moetta.core.adapter import Adapter
from moetta.core.config import Config, positive, require, share
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.step_report import StepReport, Totals
from moetta.files import read_safetensors, write_atomically
from moetta.guard.events import MODES, Event, Findings, GuardReport
from moetta.guard.reference import Reference
from moetta.guard.watch import Watch

logger = logging.getLogger("moetta")

FORMAT = "moetta-guard"
VERSION = "1"
EVENTS_KEPT = 100
# Once any detector reaches this level, every image is looked at.
SUSPICION = 0.5
LOOKS_BETWEEN_SNAPSHOTS = 8
# A rate is raised again after this many cool-downs without trouble.
CALM_COOLDOWNS = 64
_COUNTS = [f.name for f in fields(Totals) if f.name != "losses"]


@dataclass(frozen=True)
class GuardConfig(Config):
    """The guard's options.

    Attributes:
        seed: seed of the choice of sampled images.
        sample: images in one look, and the most that are sampled from one batch in good times.
        share: the largest share of the traffic that the source model classifies too, in good times.
            It is what the guard costs, in forward passes per image.
        probation: the source model classifies this many images after a start or a resumption, and
            all while a detector is at least half-way to an alarm.
        tolerance: the share of the predictions that adaptation may spoil before this counts as
            trouble. 0.005 is half a point of accuracy.
        interval: looks between false alarms, on average.
        drift_limit: the largest relative distance of the trained parameters from their source
            values. At 1 they have moved by their own norm.
        cooldown: images to wait after the first trouble before learning again.
        backoff: factor by which each further trouble lengthens the wait and shortens the steps.
    """

    sample: int = 16
    share: float = 0.25
    probation: int = 1024
    tolerance: float = 0.005
    interval: float = 10_000.0
    drift_limit: float = 1.0
    cooldown: int = 1024
    backoff: float = 4.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "sample", "share", "drift_limit", "cooldown")
        require(self.probation >= 0, f"probation must be at least 0, got {self.probation}")
        share(self, "tolerance")
        require(self.share <= 1, f"share must be at most 1, got {self.share}")
        require(self.interval > 1, f"interval must be above 1, got {self.interval}")
        require(self.backoff >= 1, f"backoff must be at least 1, got {self.backoff}")


class Guard(Adapter):
    """An adapter that keeps another one from doing harm.

    It is called like the adapter it wraps, and reports, saves, loads and resets like it. On a
    sample of the traffic it asks the source model too, and compares. When the adapted model is
    found to be worse, it goes back to the last good state and holds that; at the next trouble it
    goes back to the source model and serves that. After a wait it learns again, in shorter steps.

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
        mode: "adapt", "hold" or "source"; see `Findings`.

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
        self.adapter = adapter
        self.options = GuardConfig.preset(**options)
        self.reference = Reference(adapter)
        self.on_prediction: Callable[[Tensor], None] | None = adapter.on_prediction
        self._paused = False
        self._start_over()
        self._saved: dict[str, Tensor] | None = None

    def _start_over(self) -> None:
        """Set everything the guard remembers to its initial value."""
        self.watch = self._new_watch()
        self.steps = 0
        self.totals = Totals()
        self.last: GuardReport | None = None
        self.mode = "adapt"
        self.level = 0
        self.counts: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._good = self.adapter.state_dict()
        self._good_is_source = True
        self._wait = 0  # images until learning resumes, or until calm
        self._credit = 0.0
        self._probation = self.options.probation
        self._since_good = 0
        self._drift = self.reference.drift()

    def _new_watch(self) -> Watch:
        return Watch(self.options.sample, self.options.tolerance, self.options.interval)

    def __getattr__(self, name: str) -> Any:
        # Attributes of the wrapped adapter: model, network, config, trained, running, optimizer.
        if name == "adapter":
            raise AttributeError(name)
        return getattr(self.adapter, name)

    @property
    def rate(self) -> float:
        """The share of each learning step that is kept."""
        return float(self.options.backoff**-self.level)

    @property
    def activated_parameters(self) -> int:
        """Trained numbers that one sample's prediction uses."""
        return self.adapter.activated_parameters

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
            if self._paused:
                logits, report = (
                    self._source(inputs) if self.mode == "source" else self._asked(inputs)
                )
                self._publish(_changed(report, skipped="paused"), None, self.mode == "source")
                return logits
            if self.mode == "source":
                logits, report = self._source(inputs)
                event, from_source = None, True
            else:
                logits, report, event = self._watched(inputs)
                from_source = event is not None
            self.steps += 1
            event = self._pass_time(report.samples) or event
            self._publish(report, event, from_source)
            return logits

    def _asked(self, inputs: Inputs) -> tuple[Tensor, StepReport]:
        """The adapter's call, unwatched."""
        with self._listening(self._answer):
            logits = self.adapter(*inputs.args, **inputs.kwargs)
        assert self.adapter.last is not None
        return logits, self.adapter.last

    def _source(self, inputs: Inputs) -> tuple[Tensor, StepReport]:
        """The source model's answer."""
        logits = self.reference.logits(inputs)
        self._answer(logits)
        size = len(inputs)
        why = "guard: source model"
        return logits, StepReport(size, size, 0, entropy(logits), skipped=why)

    def _watched(self, inputs: Inputs) -> tuple[Tensor, StepReport, Event | None]:
        """The adapter's call, checked between its prediction and its update."""
        found: list[tuple[str, float, float]] = []
        answers: list[Tensor] = []
        extra = 0

        def look(logits: Tensor) -> None:
            nonlocal extra
            trouble, extra = self._check(inputs, logits)
            if trouble is not None:  # then the answers to this batch are in doubt as well
                found.append(trouble)
                logits = self.reference.logits(inputs)
                extra += len(inputs)
            answers.append(logits)
            self._answer(logits)

        hold = self.mode == "hold"
        # Steps on fewer images than a look are shorter: the linear scaling rule of learning rates.
        # Without it one image moves the model as far as a batch of 64.
        kept = self.rate * min(1.0, len(inputs) / self.options.sample)
        before = self._values() if kept < 1 and not hold else []
        with self._listening(look), self.adapter.paused() if hold else contextlib.nullcontext():
            self.adapter(*inputs.args, **inputs.kwargs)
        self._shorten_step(before, kept)
        report = self.adapter.last
        assert report is not None
        report = _changed(report, forwards=report.forwards + extra)
        if hold:
            report = _changed(report, skipped="guard: hold")
        if not found and not all(map(_finite, self.adapter.trained.values())):
            found.append(("non-finite", math.nan, 0.0))
        if not found:
            self._keep_if_good()
            return answers[0], report, None
        return answers[0], _changed(report, entropy=entropy(answers[0])), self._act(*found[0])

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
            self.on_prediction(logits)

    def _values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.adapter.trained.values()]

    def _shorten_step(self, before: list[Tensor], kept: float) -> None:
        """Keep only a part of the step; with SGD this is a lower learning rate."""
        with torch.no_grad():
            for parameter, start in zip(self.adapter.trained.values(), before, strict=False):
                parameter.copy_(torch.lerp(start, parameter, kept))

    # --- watching -------------------------------------------------------------------------------

    def _check(self, inputs: Inputs, logits: Tensor) -> tuple[tuple[str, float, float] | None, int]:
        """Look at a sample of the batch.

        Returns:
            Reason, value and threshold of trouble, if any, and how many images were sampled.
        """
        if not _finite(logits):
            return ("non-finite", math.nan, 0.0), 0
        index = self._choose(len(inputs)).to(logits.device)
        if len(index) == 0:
            return None, 0
        looks = self.watch.looks
        name = self.watch.add(self.reference.logits(inputs.select(index)), logits[index])
        if self.watch.looks > looks:
            self._since_good += self.watch.looks - looks
            self._drift = self.reference.drift()
            if self.mode == "adapt" and self._drift > self.options.drift_limit:
                return ("drift", self._drift, self.options.drift_limit), len(index)
        return None if name is None else (name, self.watch.levels[name], 1.0), len(index)

    def _choose(self, size: int) -> Tensor:
        """Positions of the images to sample: a function of (seed, step) and of the batch sizes."""
        count = size
        if self._probation <= 0 and max(self.watch.levels.values()) < SUSPICION:
            most = float(min(size, self.options.sample))
            self._credit = min(self._credit + size * self.options.share, most)
            count = int(self._credit)
            self._credit -= count
        self._probation = max(0, self._probation - size)
        seed = (self.options.seed * 1_000_003 + self.steps) * 1_009 + 907
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        return torch.randperm(size, generator=generator)[:count]

    def _keep_if_good(self) -> None:
        """Remember the current state if no detector holds evidence against it."""
        if self.mode != "adapt" or self._since_good < LOOKS_BETWEEN_SNAPSHOTS:
            return
        if self.watch.calm:
            self._good = self.adapter.state_dict()
            self._good_is_source = False
            self._since_good = 0

    # --- acting ---------------------------------------------------------------------------------

    def _act(self, reason: str, value: float, threshold: float) -> Event:
        """Go back to the last good state or, if that was not enough, to the source model."""
        to_source = self.level > 0 or self._good_is_source
        if to_source:
            self.adapter.reset()
            self._good = self.adapter.state_dict()
            self._good_is_source = True
        else:
            self.adapter.load_state_dict(self._good)
        self.mode = "source" if to_source else "hold"
        self._wait = int(self.options.cooldown * self.options.backoff**self.level)
        self.level += 1
        self._forget()
        return self._record(reason, "reset" if to_source else "rollback", value, threshold)

    def _pass_time(self, images: int) -> Event | None:
        """Resume learning after the wait; raise the rate after a long calm spell."""
        if self._wait == 0:
            return None
        self._wait = max(0, self._wait - images)
        if self._wait:
            return None
        last = self.options.cooldown * self.options.backoff ** (self.level - 1)
        if self.mode == "adapt":
            self.level -= 1
            self._wait = int(CALM_COOLDOWNS * last / self.options.backoff) if self.level else 0
            return self._record("", "calm", self.rate, 1.0)
        self.mode = "adapt"
        self._wait = int(CALM_COOLDOWNS * last)
        self._forget()
        return self._record("", "resume", self.rate, 1.0)

    def _forget(self) -> None:
        self.watch.clear()
        self._credit = 0.0
        self._probation = self.options.probation
        self._since_good = 0
        self._drift = self.reference.drift()

    def _record(self, reason: str, action: str, value: float, threshold: float) -> Event:
        event = Event(self.steps + (1 if reason else 0), reason, action, value, threshold)
        self.events.append(event)
        self.counts[action] += 1
        if reason:
            self.counts[f"{action}: {reason}"] += 1
            logger.warning(
                "guard: %s at step %d because of %s (%.4g, threshold %.4g); learning stops for %d "
                "images",
                action, event.step, reason, value, threshold, self._wait,
            )  # fmt: skip
        else:
            logger.info("guard: %s at step %d, rate %.4g", action, event.step, self.rate)
        return event

    def _publish(self, report: StepReport, event: Event | None, from_source: bool) -> None:
        values = {f.name: getattr(report, f.name) for f in fields(StepReport)}
        findings = Findings(
            mode=self.mode,
            rate=self.rate,
            drift=self._drift,
            levels=self.watch.levels,
            look=self.watch.last,
            event=event,
            from_source=from_source,
        )
        self.last = GuardReport(**values, guard=findings)
        self.totals = self.totals.plus(self.last)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The adapter's state and the guard's, as tensors (copies)."""
        with self.lock:
            return self._collect()

    def _collect(self) -> dict[str, Tensor]:
        numbers = [
            self.steps, self.level, MODES.index(self.mode), self._good_is_source, self._wait,
            self._credit, self._since_good, self._drift, self._probation,
            *(getattr(self.totals, name) for name in _COUNTS),
        ]  # fmt: skip
        out = self.adapter.state_dict()
        out |= {f"guard.good.{k}": v.clone() for k, v in self._good.items()}
        out |= {f"guard.watch.{k}": v for k, v in self.watch.state().items()}
        out |= {f"guard.count.{k}": torch.tensor(v) for k, v in self.counts.items()}
        out |= {f"guard.loss.{k}": _double(v) for k, v in self.totals.losses.items()}
        out["guard.numbers"] = _double(numbers)
        out["guard.events"] = _double([e.numbers() for e in self.events]).reshape(-1, 5)
        return out

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Restore a `state_dict`, bit for bit.

        Raises:
            ValueError: it does not fit this guard or its adapter. Nothing has changed then.
            RuntimeError: the adapter was unwrapped.
        """
        with self.lock:
            self._restore(tensors)

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        parts = _parts(tensors)
        if "guard.numbers" not in tensors:
            raise ValueError(
                "this state was not saved by a guard; load it into the adapter before guarding it"
            )
        try:  # the guard's part first, so that nothing has changed if it does not fit
            watch = self._new_watch()
            watch.restore(parts["watch"])
            values = tensors["guard.numbers"].tolist()
            events = [Event.of_numbers(row) for row in tensors["guard.events"].tolist()]
            counted = {
                name: value if name == "entropy" else int(value)
                for name, value in zip(_COUNTS, values[9:], strict=True)
            }
            mode = MODES[int(values[2])]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"this guard state is incomplete or damaged: {error}") from error
        present = self.adapter.state_dict()
        self.adapter.load_state_dict(parts["good"])  # refuses what does not fit, changing nothing
        try:
            self.adapter.load_state_dict(parts["adapter"])
        except ValueError:
            self.adapter.load_state_dict(present)
            raise
        self._good = {k: v.clone() for k, v in parts["good"].items()}
        self.watch, self.mode = watch, mode
        self.steps, self.level, self._wait = (int(values[i]) for i in (0, 1, 4))
        self._good_is_source, self._credit = bool(values[3]), values[5]
        self._since_good, self._drift, self._probation = int(values[6]), values[7], int(values[8])
        losses = {k: float(v) for k, v in parts["loss"].items()}
        self.totals = Totals(**counted, losses=losses)
        self.counts = Counter({k: int(v) for k, v in parts["count"].items()})
        self.events = deque(events, maxlen=EVENTS_KEPT)

    def reset(self) -> None:
        """Return the adapter, and all that the guard remembers, to the moment of construction."""
        with self.lock:
            self.adapter.reset()
            self._start_over()

    def snapshot(self) -> None:
        """Remember the current state, in memory."""
        self._saved = self.state_dict()

    def rollback(self) -> None:
        """Return to the last `snapshot`.

        Raises:
            RuntimeError: there is none, or the adapter was unwrapped.
        """
        if self._saved is None:
            raise RuntimeError("there is nothing to roll back to; call guard.snapshot() first")
        self.load_state_dict(self._saved)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically."""
        tensors = {k: v.cpu().contiguous() for k, v in self.state_dict().items()}
        write_atomically(path, to_bytes(tensors, self._identity()))

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the state from a file that `save` wrote for the same model and configuration.

        Raises:
            ValueError: the file is damaged, not a guard's, or saved for something else.
            RuntimeError: the adapter was unwrapped.
        """
        tensors, metadata = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} was not saved by a guard")
        for key, ours in self._identity().items():
            if metadata.get(key) != ours:
                raise ValueError(
                    f"{path} was saved for another {key}: file {metadata.get(key)!r}, here {ours!r}"
                )
        self.load_state_dict(tensors)

    def _identity(self) -> dict[str, str]:
        """What a file must match."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "method": self.adapter.method,
            "config": json.dumps(self.adapter.config.to_dict(), sort_keys=True),
            "guard": json.dumps(self.options.to_dict(), sort_keys=True),
            "model": self.adapter.fingerprint(),
        }

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


def _changed(report: StepReport, **values: Any) -> StepReport:
    return StepReport(**{**{f.name: getattr(report, f.name) for f in fields(StepReport)}, **values})


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _parts(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors by part: the adapter's, and the guard's good, watch, count and loss."""
    out: dict[str, dict[str, Tensor]] = {
        k: {} for k in ("adapter", "good", "watch", "count", "loss")
    }
    for key, value in tensors.items():
        if not key.startswith("guard."):
            out["adapter"][key] = value
            continue
        part, _, rest = key.removeprefix("guard.").partition(".")
        if part in out and rest:
            out[part][rest] = value
    return out
