"""A replica's side of merging: counts what it learns, contributes it, goes on from the result."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moetta.core import state as states
from moetta.core.adapter import Adapter
from moetta.serve.merge import Contribution, State, Tally, rebase
from moetta.serve.refusal import Refusal
from moetta.serve.service import Service
from moetta.serve.tenant import Tenant

log = logging.getLogger("moetta.serve")
T = TypeVar("T")
FETCH = 10.0
"""Seconds in which the keeper must answer."""
STALE = -1


def identity(adapter: Adapter) -> dict[str, str]:
    """What a saved state belongs to; the same as in a file of `Adapter.save`."""
    return {
        "format": states.FORMAT,
        "version": states.VERSION,
        "method": adapter.method,
        "config": json.dumps(adapter.config.to_dict(), sort_keys=True),
        "model": adapter.fingerprint(),
    }


@dataclass
class Progress:
    """One tenant's, since its last merge; belongs to the engine's thread.

    Attributes:
        version: the merged state that it started from; STALE after its learning was undone.
        steps: the adapter's steps then.
        tally: what it has learnt from since.
        sent: the state that it contributed, until the merged one comes back.
    """

    version: int
    steps: int
    tally: Tally = field(default_factory=Tally)
    sent: State | None = None


class Merging:
    """Merging in one replica.

    Args:
        service: the replica's.
        keeper: the actor that merges.
        every: updates after which a merge is due.
    """

    def __init__(self, service: Service, keeper: Any, every: int) -> None:
        self._service = service
        self._keeper = keeper
        self._every = every
        self._progress: dict[str, Progress] = {}
        self._held: dict[str, tuple[int, State]] = {}
        self._adapter = service.tenants.example()
        self._initial = _plain(self._adapter.state_dict())
        service.engine.on_update = self._updated
        service.tenants.on_evict = self._evicted

    def introduction(self) -> dict[str, Any]:
        """What the keeper has to know."""
        return {
            "identity": identity(self._adapter),
            "initial": self._initial,
            "held": dict(self._held),
        }

    # --- in the engine's thread -----------------------------------------------------------------

    def begin(self, tenant: Tenant) -> None:
        """Start a tenant that comes into memory from the merged state.

        Raises:
            Refusal: 503; the keeper does not answer.
        """
        import ray

        try:
            version, state = ray.get(self._keeper.state.remote(tenant.name), timeout=FETCH)
        except Exception as error:
            log.error("the state of stream %s could not be fetched: %s", tenant.name, error)
            raise Refusal(
                503, "the merged state of this stream cannot be reached; try again", retry_after=2
            ) from None
        self._load(tenant, version, state, state)
        log.info("stream %s continues at step %d", tenant.name, tenant.adapter.steps)

    def _load(self, tenant: Tenant, version: int, merged: State, state: State) -> None:
        tenant.adapter.load_state_dict(state)
        if tenant.guarded:  # it counts for itself
            tenant.answering.steps = tenant.adapter.steps  # type: ignore[misc]
        tenant.unsaved = 0
        self._progress[tenant.name] = Progress(version, tenant.adapter.steps)
        self._held[tenant.name] = (version, merged)

    def _updated(self, tenant: Tenant) -> None:
        """Called after every update."""
        progress = self._progress[tenant.name]
        if not _adapts(tenant) or tenant.adapter.steps < progress.steps:
            progress.version = STALE  # the guard took back what was learnt
            progress.tally = Tally()
        elif tenant.adapter.last is not None:
            progress.tally.add(tenant.adapter.last, tenant.adapter.expert_counts())
        # Again and again until it happens: a keeper that was restarted forgets what is due.
        if progress.tally.updates and progress.tally.updates % self._every == 0:
            self._keeper.due.remote(tenant.name)

    def _take(self, name: str, version: int) -> Contribution | None:
        tenant, progress = self._service.tenants.peek(name), self._progress.get(name)
        if tenant is None or progress is None or progress.version != version:
            return None
        if not _adapts(tenant) or tenant.adapter.steps < progress.steps:
            return None
        state = _plain(tenant.adapter.state_dict())
        tally, progress.tally = progress.tally, Tally()
        progress.sent = state
        return Contribution(state, tally.images, tally.experts)

    def _adopt(self, name: str, version: int, state: State, force: bool) -> None:
        tenant = self._service.tenants.peek(name)
        if tenant is None:
            return
        if force:
            tenant.answering.reset()
            tenant.clear_pool()
        elif not _adapts(tenant):
            self._progress[name].version = STALE
            return
        progress = self._progress[name]
        with tenant.adapter.lock:
            since, own = progress.tally, state
            fits = progress.sent is not None and progress.version != STALE
            if fits and not force and tenant.adapter.steps >= progress.steps:
                assert progress.sent is not None
                own = rebase(state, progress.sent, _plain(tenant.adapter.state_dict()))
            else:
                since = Tally()
            self._load(tenant, version, state, own)
        self._progress[name].tally = since

    def _evicted(self, tenant: Tenant) -> None:
        progress = self._progress.get(tenant.name)
        if progress is not None:
            version = progress.version
            given = self._take(tenant.name, version)
            del self._progress[tenant.name], self._held[tenant.name]
            if given is not None and given.images:
                self._keeper.leave.remote(tenant.name, version, given)

    # --- from the event loop --------------------------------------------------------------------

    async def contribute(self, name: str, version: int) -> Contribution | None:
        """What was learnt from a stream since that version, or None."""
        return await self._in_engine(lambda: self._take(name, version))

    async def adopt(self, name: str, version: int, state: State, force: bool) -> None:
        """Go on from a merged state; what was learnt since contributing is kept."""
        await self._in_engine(lambda: self._adopt(name, version, state, force))

    async def leave(self) -> None:
        """Hand over everything that was learnt; the replica ends."""
        given = []
        for tenant in self._service.tenants:
            version = self._progress[tenant.name].version
            part = await self.contribute(tenant.name, version)
            if part is not None and part.images:
                given.append(self._keeper.leave.remote(tenant.name, version, part))
        for reference in given:
            try:
                await asyncio.wait_for(_wait(reference), FETCH)
            except Exception as error:
                log.error("what was learnt since the last merge is lost: %s", error)

    async def _in_engine(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._service.engine.call(function))


async def _wait(reference: Any) -> Any:
    return await reference


def _adapts(tenant: Tenant) -> bool:
    """Whether it learns; a guard may hold it, or answer with the source model."""
    return getattr(tenant.answering, "mode", "adapt") == "adapt"


def _plain(state: State) -> State:
    return {key: value.cpu() for key, value in state.items()}
