"""The contract every method keeps: predict, then learn; and forget, save, restore on demand."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moetta.core import source_images, state
from moetta.core.config import Config
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.step_report import StepReport, Totals
from moetta.core.surgery import Surgery

Source = Tensor | Iterable[Any] | str | PathLike[str] | None


@dataclass
class Step:
    """What a method did with one batch; the adapter turns it into a `StepReport`."""

    logits: Tensor
    forwards: int = 0
    backwards: int = 0
    entropy: Tensor | None = None
    selected: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    routing: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None


class Adapter:
    """A classifier that learns from the very batches it is asked to classify.

    A method subclasses this and writes `build` (what is trained), `learn` (one step) and, where it
    has them, its running values (`self.running`). Everything else is common: input checks, grad
    mode, counters, reset, state, snapshots.

    Attributes:
        model: what is called: the adapted network, compiled where the user's model was.
        network: the adapted network itself. It shares its frozen weights' memory with the original.
        config: the method's frozen configuration.
        last: what the last call did.
        totals: the same, summed since construction or `reset`.
    """

    method: ClassVar[str] = ""
    needs_source: ClassVar[bool] = False
    # Fields whose content the state carries: a saved state may come from one with another value.
    held_in_state: ClassVar[tuple[str, ...]] = ()

    last: StepReport | None
    totals: Totals

    def __init__(
        self, model: nn.Module, config: Config, source: Source = None, inplace: bool = False
    ) -> None:
        self.config: Any = config
        self._surgery = Surgery(model, inplace)
        self.model = self._surgery.model
        self.network = self._surgery.network
        self.trained: dict[str, nn.Parameter] = {}
        self.running: dict[str, Tensor | None] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self.last = None
        self.totals = Totals()
        self._paused = False
        self._snapshot: dict[str, Tensor] | None = None
        self.from_source: list[str] = []  # the running values that were computed from source images
        try:
            with torch.inference_mode(False):
                self.build(source)
        except BaseException:
            self._surgery.undo()  # a refused inplace=True must leave the user's model as it was
            raise
        self._initial = self.state_dict()

    # --- what a method writes -------------------------------------------------------------------

    def build(self, source: Source) -> None:
        """Choose what is trained (`self.train`), make the optimiser, set the running values."""
        raise TypeError(f"{type(self).__name__} does not say what it trains")

    def learn(self, inputs: Inputs) -> Step:
        """Predict one batch and learn from it."""
        raise TypeError(f"{type(self).__name__} does not say how it learns")

    def predict(self, inputs: Inputs) -> Tensor:
        """Predict without learning."""
        return inputs.logits(self.model)

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Experts of each sample in the last prediction, by layer; nothing without experts."""
        return {}

    @property
    def activated_parameters(self) -> int:
        """Trained numbers that one sample's prediction uses (the paper's table 2)."""
        return sum(p.numel() for p in self.trained.values())

    # --- the call -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch, then learn from it; returns detached logits.

        Raises:
            ValueError: the batch is empty, has non-finite values or does not fit the model. Nothing
                has changed then.
        """
        self._surgery.check_alive()
        with torch.inference_mode(False):
            inputs = Inputs.checked(args, kwargs)
            # Autocast keeps low-precision copies of trained weights; after a step they are stale.
            torch.clear_autocast_cache()
            if self._paused:
                with torch.no_grad():
                    step = Step(self.predict(inputs), forwards=len(inputs), skipped="paused")
                    step.routing = self.routing(len(inputs))
            else:
                with torch.enable_grad():
                    step = self.learn(inputs)
                self.steps += 1
            torch.clear_autocast_cache()
            return self._account(len(inputs), step)

    def _account(self, samples: int, step: Step) -> Tensor:
        logits = step.logits.detach()
        if logits.is_inference():
            logits = logits.clone()
        self.last = StepReport(
            samples=samples,
            forwards=step.forwards,
            backwards=step.backwards,
            entropy=entropy(logits) if step.entropy is None else step.entropy.detach(),
            selected=step.selected,
            losses={name: float(value.detach()) for name, value in step.losses.items()},
            routing=step.routing,
            skipped=step.skipped,
        )
        self.totals = self.totals.plus(self.last)
        return logits

    # --- helpers for methods --------------------------------------------------------------------

    def train(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        """Make these parameters trainable, with memory of their own; returns them."""
        self._surgery.leave_fast_paths()
        known = {id(parameter) for parameter in self.trained.values()}
        coarse = False
        for name, parameter in parameters:
            coarse |= parameter.dtype in (torch.bfloat16, torch.float16)
            self._surgery.own(name, parameter)
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

        They are drawn where the model is, unless ``device`` says otherwise: numbers drawn on the
        CPU are the same for a model on any device.
        """
        mixed = (self.config.seed * 1_000_003 + self.steps) * 1_009 + stream
        return torch.Generator(device or self.device).manual_seed(mixed % (1 << 63))

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def gradients(self, loss: Tensor) -> list[Tensor] | None:
        """Gradients for the trained parameters, or None where loss or gradient is not finite.

        Raises:
            ValueError: the loss does not depend on any of them. Nothing has changed then.
        """
        parameters = list(self.trained.values())
        if not loss.requires_grad:
            raise ValueError(
                "the model's logits carry no gradient to learn from: its forward pass runs under "
                "no_grad or detaches them, or uses reentrant gradient checkpointing (use the kind "
                "with use_reentrant=False)"
            )
        if not torch.isfinite(loss):
            return None
        # Backward ops run in the types their forward ops chose: autocast must not cast them again.
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)
        ]
        total = torch.nn.utils.get_total_norm(grads)
        return grads if torch.isfinite(total) else None

    def descend(self, loss: Tensor) -> str | None:
        """One optimiser step down ``loss``; returns why it was skipped, or None."""
        grads = self.gradients(loss)
        if grads is None:
            return "non-finite loss or gradient"
        self.apply(grads)
        return None

    def apply(self, grads: list[Tensor]) -> None:
        """One optimiser step along these gradients."""
        assert self.optimizer is not None
        for parameter, grad in zip(self.trained.values(), grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that adaptation has made, as tensors (copies); the frozen backbone is not in it."""
        return state.collect(self)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Restore a `state_dict`, bit for bit.

        Names, shapes and types are checked; that it came from the same method, configuration and
        model only a file can tell (`save` and `load`).

        Raises:
            ValueError: it does not fit this adapter; the message says what differs. Nothing has
                changed then.
            RuntimeError: the adapter was unwrapped; its parameters are the user's again.
        """
        self._surgery.check_alive()
        state.restore(self, tensors)

    def reset(self) -> None:
        """Back to the moment of construction: weights, optimiser, averages, random numbers."""
        self.load_state_dict(self._initial)
        self.last = None

    def snapshot(self) -> None:
        """Remember the present state, in memory."""
        self._snapshot = self.state_dict()

    def rollback(self) -> None:
        """Return to the last `snapshot`.

        Raises:
            RuntimeError: there is none, or the adapter was unwrapped.
        """
        if self._snapshot is None:
            raise RuntimeError("there is nothing to roll back to; call adapter.snapshot() first")
        self.load_state_dict(self._snapshot)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically."""
        state.save(self, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore the state from a file that `save` wrote for the same model and configuration.

        Raises:
            ValueError: the file is damaged, foreign, or made for something else.
            RuntimeError: the adapter was unwrapped.
        """
        self._surgery.check_alive()
        state.load(self, path)

    def save_source(self, path: str | PathLike[str]) -> None:
        """Write what was computed from the source images; pass ``source=path`` next time.

        Raises:
            ValueError: this adapter computed nothing from source images.
        """
        if not self.from_source:
            raise ValueError(f"this {self.method} adapter keeps nothing of source images")
        source_images.save(self, path)

    @contextlib.contextmanager
    def paused(self) -> Iterator[Adapter]:
        """Within the block, predict without learning."""
        before, self._paused = self._paused, True
        try:
            yield self
        finally:
            self._paused = before

    # --- leaving --------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A hash of the source model's weights: what a saved state belongs to."""
        return self._surgery.fingerprint()

    def unwrap(self) -> nn.Module:
        """The original model, as it was before adaptation.

        After ``inplace=True`` this takes the adaptation out of the user's object, and the adapter
        can no longer be called.
        """
        return self._surgery.undo()

    def merge(self) -> nn.Module:
        """A model of its own, without the adapter, that keeps what was learnt and stays so."""
        self._surgery.check_alive()
        return self._surgery.detached_copy()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {self.config}, "
            f"steps={self.steps}, trained={sum(p.numel() for p in self.trained.values()):,})"
        )
