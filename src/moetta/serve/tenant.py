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
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class Answering(Protocol):
    """An adapter, or a guard around one."""

    on_prediction: Callable[[Tensor], None] | None

    @property
    def steps(self) -> int:
        """Batches learnt from, or offered for it."""

    def __call__(self, images: Tensor, /) -> Tensor:
        """Predict, then learn."""

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
    unsaved: int = 0
    saving: Future[Snapshot] | None = None
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def learns(self) -> bool:
        """Whether its method learns anything."""
        return bool(self.adapter.trained)

    @property
    def guarded(self) -> bool:
        """Whether a guard stands around the adapter."""
        return self.answering is not self.adapter

    def clear_pool(self) -> None:
        """Forget the images that wait to be learnt from."""
        self.pool, self.pooled = [], 0


def tenant_name(header: str | None) -> str:
    """The tenant that a request's X-Stream-Id names.

    Raises:
        Refusal: 422; it is not a name.
    """
    if header is None:
        return DEFAULT
    if not re.fullmatch(NAME, header):
        raise Refusal(
            422,
            "X-Stream-Id must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter "
            "or digit",
        )
    return header
