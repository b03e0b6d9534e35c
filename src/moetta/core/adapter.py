"""The contract that every method keeps: predict, then learn; reset, save and restore on demand."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, ClassVar, Generic, Self

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from moetta.core import source_images, spread, state
from moetta.core.config import Config
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective, Step
from moetta.core.resets import POLICY, make_policy
from moetta.core.step_report import StepReport, Totals
from moetta.core.surgery import Surgery
from moetta.nn.ranks import Ranks, Share, differentiating

Source = Tensor | Iterable[Any] | str | PathLike[str] | None

CHECK_EVERY = 100
"""After how many steps several ranks compare their states."""

C = TypeVar("C", bound=Config, covariant=True, default=Config)


class Adapter(Generic[C]):
    """A classifier that learns from the batches it classifies.

    A method extends this class, names its configuration in brackets and writes two things:
    `build` (what is trained) and `objective` (what is minimised). Running values go into
    `self.running`. Everything else is common to all methods: input checks, gradient mode, steps,
    counters, reset, state, snapshots. A method that steps in its own way overrides `learn` instead
    of `objective`. `NormAffineAdapter` is this class with `build` written: it trains norm layers.

    Threads: an adapter has one writer, the thread that calls it. ``last`` and ``totals`` are
    immutable objects that any thread may read at any time. A call, `state_dict`,
    `load_state_dict`, `reset`, `snapshot`, `rollback`, `save`, `load`, `merge` and `unwrap` hold
    the adapter's lock, so any thread may call them: they wait for a step that is under way, and
    see the state before it or after it, never a mix. The lock is re-entrant; `on_prediction` is
    called with it held. Everything else (``model``, ``trained``, ``running``, `paused`) belongs to
    the writer.

    Attributes:
        model: what is called: the adapted network, compiled if the user's model was.
        network: the adapted network itself. It shares the memory of its frozen weights with the
            original.
        config: the method's frozen configuration.
        last: what the last call did. On several ranks: with the whole batch, not only with this
            rank's part.
        totals: the same, summed since construction or `reset`.
        ranks: the processes that share every batch; None if this one works by itself.
        on_prediction: called once per call with the batch's detached logits, as soon as they are
            final and before the update: a service can answer while the adapter learns. Inside it,
            `routing` answers for this batch. If it raises, the call ends before the update.
        lock: held while the adapter's state is read or changed.
    """

    method: ClassVar[str] = ""
    # What to do without source images, for the message that refuses to.
    without_source: ClassVar[str] = ""
    # Fields whose content the state carries: a saved state may come from a config with other ones.
    held_in_state: ClassVar[tuple[str, ...]] = ()
    # Whether a `learn` written in this class gives the same on several ranks as in one process.
    over_ranks: ClassVar[bool] = False

    ranks: Ranks | None = None
    share: Share | None = None  # how the current call's batch is spread over them

    config: C
    last: StepReport | None
    totals: Totals

    def __init__(
        self, model: nn.Module, config: Config, source: Source = None, inplace: bool = False
    ) -> None:
        self.config = config  # type: ignore[assignment]  # checked by moetta.adapt()
        if config.needs_source and source is None:
            raise ValueError(
                f"{self.method} needs clean source images: pass source=images (a tensor or an "
                "iterable of batches; no labels needed), or the path of a file written by "
                f"adapter.save_source(){self.without_source}"
            )
        self.lock = threading.RLock()
        self.on_prediction: Callable[[Tensor], None] | None = None
        self.surgery = Surgery(model, inplace)
        self.model = self.surgery.model
        self.network = self.surgery.network
        self.trained: dict[str, nn.Parameter] = {}
        self.running: dict[str, Tensor | None] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self.last = None
        self.totals = Totals()
        self._paused = False
        self._answered = False
        self._listeners = False  # whether any rank has on_prediction set
        self._snapshot: dict[str, Tensor] | None = None
        self._gathered: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []
        self.from_source: list[str] = []  # running values that were computed from source images
        try:
            with torch.inference_mode(False):
                self.build(source)
        except BaseException:
            self.surgery.undo()  # a refused inplace=True must leave the user's model as it was
            raise
        self.resets = make_policy(self)
        self._initial = self.state_dict()

    # --- what a method writes -------------------------------------------------------------------

    def build(self, source: Source) -> None:
        """Choose what is trained (`make_trainable`), make the optimiser, set running values."""
        raise TypeError(f"{type(self).__name__} does not define build(): what does it train?")

    def objective(self, inputs: Inputs) -> Objective:
        """Predict one batch and say what to minimise; changes nothing."""
        raise TypeError(f"{type(self).__name__} defines neither objective() nor learn()")

    def after_step(self, objective: Objective) -> None:
        """Called after a batch was learnt from, with the new weights in place."""

    def learn(self, inputs: Inputs) -> Step:
        """Predict one batch and take one step down its objective.

        A method that steps in its own way overrides this. It should call `predicted` as soon as
        its logits are final.
        """
        size = len(inputs)
        found = self.objective(inputs)
        routing = self.routing(size)
        self.predicted(found.logits)
        skipped = found.why_not()
        if skipped is None and found.losses:
            skipped = self.descend(found.total())
        step = Step(
            found.logits,
            forwards=size if found.forwards is None else found.forwards,
            entropy=found.entropy,
            selected=found.selected,
            losses=found.losses,
            routing=routing,
            skipped=skipped,
        )
        if skipped is None:
            self.running.update(found.running)
            self.after_step(found)
            if found.backwards is not None:
                step.backwards = found.backwards
            elif found.losses:
                step.backwards = size if found.selected is None else int(found.selected.sum())
        return step

    def predict(self, inputs: Inputs) -> Tensor:
        """Predict without learning."""
        return inputs.logits(self.model)

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Experts of each sample in the last prediction [B, k], by layer; empty without experts."""
        return {}

    def experts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Offsets of scale and shift, [E, D] each, by layer; empty if there are no such experts."""
        return {}

    def expert_counts(self) -> dict[str, int]:
        """How many experts each routed layer has; empty if nothing is routed."""
        return {name: len(weight) for name, (weight, _) in self.experts().items()}

    @property
    def activated_parameters(self) -> int:
        """Trained numbers that one sample's prediction uses (the paper's table 2)."""
        return sum(p.numel() for p in self.trained.values())

    # --- the call -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch, then learn from it; returns detached logits.

        On several ranks each passes its part of the batch, which may be empty on some, and gets the
        logits of that part. ``last`` and ``totals`` are about the whole batch.

        Raises:
            ValueError: the batch is empty, has non-finite values or does not fit the model. Nothing
                has changed then.
            RankLost: another rank has ended or does not answer.
        """
        with self.lock, torch.inference_mode(False):
            self.surgery.check_alive()
            if self.ranks is None:
                return self._take(Inputs.checked(args, kwargs))
            inputs, self._listeners = spread.agreed(self, self.ranks, args, kwargs, self._paused)
            self.share = inputs.share
            try:
                logits = self._take(inputs)
            finally:
                self.share = None
                self._gathered.clear()
            if not self._paused and self.steps % CHECK_EVERY == 0:
                self.check_ranks()
            return logits

    def _take(self, inputs: Inputs) -> Tensor:
        """Predict one batch that was checked, and learn from it unless paused."""
        self._answered = False
        # Autocast keeps low-precision copies of trained weights; after a step they are stale.
        torch.clear_autocast_cache()
        if self._paused:
            with torch.no_grad():
                step = Step(self.predict(inputs), forwards=len(inputs), skipped="paused")
                step.routing = self.routing(len(inputs))
                self.predicted(step.logits)
        else:
            if self.resets is not None:
                self.resets.before()
            with torch.enable_grad():
                step = self.learn(inputs)
            self.predicted(step.logits)
            if self.resets is not None:
                self.resets.after(inputs, step)
            self.steps += 1
        torch.clear_autocast_cache()
        return self._account(inputs, step)

    def predicted(self, logits: Tensor) -> None:
        """Say that these logits are the batch's final prediction; only the first time counts."""
        if self._answered:
            return
        self._answered = True
        if self.share is None:
            if self.on_prediction is not None:
                self.on_prediction(_plain(logits))
        elif self._listeners:
            self.routing(self.share.total)  # gathered now, by all: a listener may ask on one rank
            with self.share.ranks.together():
                if self.on_prediction is not None:
                    self.on_prediction(_plain(self.share.mine(logits)))

    def _account(self, inputs: Inputs, step: Step) -> Tensor:
        logits = _plain(step.logits)
        if self.share is not None and len(logits) != len(inputs):
            raise ValueError(
                f"{self.method} returned logits of {len(logits)} samples for a batch of "
                f"{len(inputs)}: on several ranks they must come from inputs.logits()"
            )
        self.last = StepReport(
            samples=len(inputs),
            forwards=step.forwards,
            backwards=step.backwards,
            entropy=entropy(logits) if step.entropy is None else step.entropy.detach(),
            selected=step.selected,
            losses={name: float(value.detach()) for name, value in step.losses.items()},
            routing=step.routing,
            skipped=step.skipped,
        )
        self.totals = self.totals.plus(self.last)
        return logits if self.share is None else self.share.mine(logits)

    # --- several ranks --------------------------------------------------------------------------

    def spread(self, ranks: Ranks) -> None:
        """Share every batch from now on; all ranks call this with adapters in the same state.

        Raises:
            ValueError: this method or model cannot be used on several ranks, or the ranks do not
                have the same method, configuration or source model.
            RanksDiffer: they are not in the same state.
        """
        spread.check_alike(self, ranks)
        self.ranks = ranks
        self.check_ranks()

    @classmethod
    def steps_alone(cls) -> str | None:
        """Why this method may not step as one with other ranks, or None."""
        stepping = next(kind for kind in cls.__mro__ if "learn" in vars(kind))
        if stepping is Adapter or vars(stepping).get("over_ranks"):
            return None
        return (
            f"{stepping.__name__} defines learn(), which may look at this rank's part only; if "
            "all it uses is inputs.logits(), inputs.whole() and self.gradients(), say so with "
            "over_ranks = True in the class"
        )

    def check_ranks(self) -> None:
        """Check that all ranks are in the same state; all of them have to call this.

        Raises:
            RanksDiffer: they are not; names the first tensor that differs.
        """
        if self.ranks is not None:
            spread.compare(self, self.ranks)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values with a row per sample of this rank's part, for the whole batch.

        Asked twice for the same tensors within a call, it exchanges them once.
        """
        if self.share is None or not tensors:
            return tensors
        rows = tuple(tensors.values())
        for known, found in self._gathered:
            if len(known) == len(rows) and all(map(operator.is_, known, rows)):
                return found
        found = dict(zip(tensors, self.share.wholes(rows), strict=True))
        self._gathered.append((rows, found))
        return found

    # --- helpers for methods --------------------------------------------------------------------

    def make_trainable(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        """Make these parameters trainable, in memory that the user's model does not share.

        Returns:
            All parameters that are trained so far, in the order of `trained`.
        """
        self.surgery.leave_fast_paths()
        known = {id(parameter) for parameter in self.trained.values()}
        coarse = False
        for name, parameter in parameters:
            coarse |= parameter.dtype in (torch.bfloat16, torch.float16)
            self.surgery.own(name, parameter)
            parameter.requires_grad_(True)
            if id(parameter) not in known:  # layers may share one; it is stepped once
                known.add(id(parameter))
                self.trained[name] = parameter
        if coarse:
            warnings.warn(
                f"{self.method} trains parameters in half precision, where most learning steps "
                "round to nothing; keep the model in float32 and call it under torch.autocast",
                stacklevel=5,
            )
        return list(self.trained.values())

    def generator(self, stream: int = 0, device: str | None = None) -> torch.Generator:
        """The random numbers of this step: a function of (seed, step, stream), never of history.

        They are drawn on the model's device, unless ``device`` says otherwise: numbers drawn on
        the CPU are the same for a model on any device.
        """
        mixed = (self.config.seed * 1_000_003 + self.steps) * 1_009 + stream
        return torch.Generator(device or self.device).manual_seed(mixed % (1 << 63))

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def gradients(self, loss: Tensor, others: Sequence[Tensor] = ()) -> list[Tensor] | None:
        """Gradients of the trained parameters and of ``others``; None if one is not finite.

        Raises:
            ValueError: the loss depends on none of them. Nothing has changed then.
        """
        parameters = [*self.trained.values(), *others]
        if not loss.requires_grad:
            raise ValueError(
                "the model's logits carry no gradient to learn from: its forward pass runs under "
                "no_grad or detaches them, or uses reentrant gradient checkpointing (use the kind "
                "with use_reentrant=False)"
            )
        finite = bool(torch.isfinite(loss))
        if not finite and self.ranks is None:
            return None
        ranked = contextlib.nullcontext() if self.ranks is None else differentiating()
        found: Sequence[Tensor | None] = [None] * len(parameters)
        # Backward ops run in the types that their forward ops chose; autocast must not cast again.
        with ranked, torch.autocast(loss.device.type, enabled=False):
            if finite:
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)
        ]
        if self.ranks is not None:
            grads, mean = self.ranks.mean(grads, loss)
            finite = math.isfinite(mean)
        total = torch.nn.utils.get_total_norm(grads)
        return grads if finite and torch.isfinite(total) else None

    def descend(self, loss: Tensor) -> str | None:
        """One optimiser step down ``loss``; returns why it was skipped, or None."""
        grads = self.gradients(loss)
        if grads is None:
            return "non-finite loss or gradient"
        self.step_along(grads)
        return None

    def step_along(self, grads: list[Tensor]) -> None:
        """One optimiser step along these gradients."""
        assert self.optimizer is not None
        if self.resets is not None:
            grads = self.resets.along(grads)
        for parameter, grad in zip(self.trained.values(), grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything that adaptation has changed; the frozen backbone is not included."""
        with self.lock:
            return state.collect(self)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Restore a `state_dict`, bit for bit.

        Names, shapes and types are checked. Whether it came from the same method, configuration
        and model can be checked only for a file (`save` and `load`).

        Raises:
            ValueError: it does not fit this adapter; the message says what differs. Nothing has
                changed then.
            RuntimeError: the adapter was unwrapped.
        """
        with self.lock:
            self.surgery.check_alive()
            state.restore(self, tensors)

    def reset(self) -> None:
        """Return to the state at construction: weights, optimiser, averages, random numbers."""
        with self.lock:
            self.load_state_dict(self._initial)
            self.last = None

    def at_start(self) -> dict[str, Tensor]:
        """The trained parameters' values at construction, by name; not copies."""
        return {name: self._initial[f"param.{name}"].to(self.device) for name in self.trained}

    def start_over(self, keep: int = 0) -> None:
        """Return to the source model and go on: weights, optimiser and averages, not the counters.

        Args:
            keep: leave this many of the trained tensors, from the first on, as they are.
        """
        with torch.no_grad():
            start = self.at_start()
            for name, parameter in list(self.trained.items())[keep:]:
                parameter.copy_(start[name])
        if self.optimizer is not None:
            self.optimizer.state.clear()
        for name in self.running:
            if not name.startswith(POLICY):
                value = self._initial.get(f"running.{name}")
                self.running[name] = None if value is None else value.to(self.device, copy=True)

    def snapshot(self) -> None:
        """Remember the current state, in memory."""
        self._snapshot = self.state_dict()

    def rollback(self) -> None:
        """Return to the last `snapshot`.

        Raises:
            RuntimeError: there is no snapshot, or the adapter was unwrapped.
        """
        if self._snapshot is None:
            raise RuntimeError("there is no snapshot to roll back to; call adapter.snapshot()")
        self.load_state_dict(self._snapshot)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically."""
        state.save(self, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the state from a file that `save` wrote for the same model and configuration.

        Raises:
            ValueError: the file is damaged, or was not saved by an adapter like this one.
            RuntimeError: the adapter was unwrapped.
        """
        self.surgery.check_alive()
        state.load(self, path)

    def save_source(self, path: str | PathLike[str]) -> None:
        """Write what was computed from the source images, to pass as ``source=path`` next time.

        Raises:
            ValueError: this adapter computed nothing from source images.
        """
        if not self.from_source:
            raise ValueError(f"this {self.method} adapter computed nothing from source images")
        source_images.save(self, path)

    @contextlib.contextmanager
    def paused(self) -> Iterator[Self]:
        """Within the block, predict without learning."""
        before, self._paused = self._paused, True
        try:
            yield self
        finally:
            self._paused = before

    # --- leaving --------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A hash of the source model's weights; a saved state belongs to these weights."""
        return self.surgery.fingerprint()

    def unwrap(self) -> nn.Module:
        """The original model, as it was before adaptation.

        After ``inplace=True`` this removes the adaptation from the user's object, and the adapter
        can no longer be called.
        """
        with self.lock:
            return self.surgery.undo()

    def merge(self) -> nn.Module:
        """A separate, frozen model that has learnt what the adapter has learnt so far."""
        with self.lock:
            self.surgery.check_alive()
            return self.surgery.detached_copy()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {self.config}, "
            f"steps={self.steps}, trained={sum(p.numel() for p in self.trained.values()):,})"
        )


def _plain(logits: Tensor) -> Tensor:
    """Detached, and usable outside inference mode."""
    logits = logits.detach()
    return logits.clone() if logits.is_inference() else logits
