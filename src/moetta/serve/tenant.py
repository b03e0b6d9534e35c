"""One tenant: what answers for it, and what is remembered of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol

from torch import Tensor

from moetta.core.adapter import Adapter
from moetta.core.step_report import StepReport
from moetta.serve.refusal import Refusal
from moetta.serve.snapshots import Snapshot, Snapshots

DEFAULT = "default"
"""The tenant of requests that name none."""
WAITING = "waiting for the first images"
ON_DISK = "on disk until its next image"
PAUSED = "paused by an operator"
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME_RULE = (
    "X-Stream-Id must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit"
)


class Answering(Protocol):
    """An adapter, or a guard around one."""

    on_prediction: Callable[[Tensor], None] | None

    @property
    def steps(self) -> int:
        """Batches learnt from, or offered for it."""

    def __call__(self, images: Tensor, /) -> Tensor:
        """Predict, then learn."""

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Experts of each sample in the last prediction, by layer."""

    def paused(self) -> AbstractContextManager[Any]:
        """Within the block, predict without learning."""

    def reset(self) -> None:
        """Return to the source model."""

    def save(self, path: str | PathLike[str], /) -> None:
        """Write the state."""

    def load(self, path: str | PathLike[str], /) -> None:
        """Restore a written state."""

    @property
    def last(self) -> StepReport | None:
        """What the last call did."""


Build = Callable[[], tuple[Answering, Adapter]]
"""Makes what a new tenant starts with: what is called, and the adapter inside it."""


@dataclass(eq=False)
class Tenant:
    """One tenant in memory; belongs to the engine's thread.

    Attributes:
        name: what the X-Stream-Id header says.
        answering: what is called with images.
        adapter: the adapter inside it.
        snapshots: its states on disk, if any are kept.
        paused: an operator stopped it from learning.
        pool: images that were answered and wait to be learnt from.
        pooled: how many they are.
        answered: images that were answered since it came into memory.
        company: its latest images, if an answer depends on the other images of its batch.
        doing: whether the last batch was learnt from, in words.
        skipped: why the last update was none.
        unsaved: changes since the latest snapshot: updates, resets and rollbacks.
        saving: the snapshot that is being written.
        counted: the guard's actions that the metrics know of.
    """

    name: str
    answering: Answering
    adapter: Adapter
    snapshots: Snapshots | None
    paused: bool = False
    pool: list[Tensor] = field(default_factory=list)
    pooled: int = 0
    answered: int = 0
    company: Tensor | None = None
    doing: str = WAITING
    skipped: str | None = None
    unsaved: int = 0
    saving: Future[Snapshot] | None = None
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def learns(self) -> bool:
        """Whether its method carries anything from one batch to the next."""
        return bool(self.adapter.trained or self.adapter.running)

    @property
    def guarded(self) -> bool:
        """Whether a guard stands around the adapter."""
        return self.answering is not self.adapter

    @property
    def mode(self) -> str:
        """The guard's mode; any thread may ask."""
        return str(getattr(self.answering, "mode", "adapt"))

    @property
    def why(self) -> str:
        """Whether it learns and why not, in words; any thread may ask."""
        if not (self.learns or self.guarded):
            return f"{self.adapter.method} learns nothing"
        if self.paused:
            return PAUSED
        if self.mode != "adapt":
            who = "source model" if self.mode == "source" else "last good state"
            left = self.answering.recovery.wait  # type: ignore[attr-defined]  # a guard has a mode
            return f"the guard stopped learning for {left} more images; the {who} answers"
        if not self.learns:
            return f"{self.adapter.method} learns nothing; the guard watches its answers"
        if self.skipped is not None and self.doing.startswith("learning"):
            return f"not learning: {self.skipped}"
        return self.doing

    def clear_pool(self) -> None:
        """Forget the images that wait to be learnt from."""
        self.pool, self.pooled = [], 0
        self.skipped = None


def tenant_name(header: str | None) -> str:
    """The tenant that a request's X-Stream-Id names.

    Raises:
        Refusal: 422; it is not a name.
    """
    if header is None:
        return DEFAULT
    if not re.fullmatch(NAME, header):
        raise Refusal(422, NAME_RULE)
    return header
