"""A replica on Ray Serve: the whole application, called inside the process instead of by HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from starlette.types import Message, Scope

from moetta.serve.app import create_app
from moetta.serve.classifier import Classifier
from moetta.serve.ray_merging import Merging
from moetta.serve.settings import Settings
from moetta.serve.tenant import Build, Tenant

log = logging.getLogger("moetta.serve")
Policy = Literal["per-replica", "by-stream", "merged"]
Make = Callable[[], tuple[Classifier, Build]]
"""Loads the model, in the replica's own process."""
NAMESPACE = "moetta"
ORPHANED = 20.0
"""Seconds without the process that started the service, after which a replica ends it."""
LOCK_WAIT = 60.0


@dataclass(frozen=True)
class Call:
    """An HTTP request."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """The answer to one, and which replica gave it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    replica: str = ""


@dataclass(frozen=True)
class Plan:
    """What every replica is told.

    Attributes:
        name: the application's name on the cluster.
        policy: what replicas share.
        merge_every: updates of a stream on one replica between two merges.
        settings: the service's.
        make: loads the model.
        verbose: log more.
    """

    name: str
    policy: Policy
    merge_every: int
    settings: Settings
    make: Make
    verbose: bool = False

    @property
    def keeper(self) -> str:
        """The name of the actor that keeps what replicas share."""
        return f"{self.name}-keeper"


class Replica:
    """One copy of the service, as Ray Serve runs it.

    Args:
        plan: what all replicas are told.
        shard: by-stream, which of the streams' shares this replica has.
    """

    def __init__(self, plan: Plan, shard: int = 0) -> None:
        from ray import serve

        logging.basicConfig(
            level=logging.INFO if plan.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
            stream=sys.stderr,
        )
        sys.setswitchinterval(0.001)
        self.plan = plan
        self.shard = shard
        self.name = serve.get_replica_context().replica_tag
        self.stopping = False
        self._paused_streams: set[str] = set()
        self._lost_since: float | None = None
        settings, self._lock = _place(plan, shard)
        classifier, build = plan.make()
        self.app = create_app(classifier, build, settings)
        self.service = self.app.state.service
        self.merging: Merging | None = None
        if plan.policy == "merged":
            self.merging = Merging(self.service, self._keeper(), plan.merge_every)
        self.service.tenants.on_new = self._new_tenant
        self._watching: asyncio.Task[None] | None = None

    def _keeper(self) -> Any:
        import ray

        return ray.get_actor(self.plan.keeper, namespace=NAMESPACE)

    async def reconfigure(self, config: Any) -> None:
        """Start; Ray Serve calls this once, before the first request."""
        if self._watching is not None:
            return
        if self.merging is not None:
            who = self.merging.introduction()
            await self._keeper().introduce.remote(who["identity"], who["initial"], who["held"])
        paused = await self._keeper().pauses.remote()
        self.service.engine.paused = paused["all"]
        self._paused_streams = set(paused["streams"])
        await self.service.start()
        self._watching = asyncio.create_task(self._watch())

    def _new_tenant(self, tenant: Tenant) -> None:
        """Called in the engine's thread with every tenant that comes into memory."""
        tenant.paused = tenant.name in self._paused_streams
        if self.merging is not None:
            self.merging.begin(tenant)

    def check_health(self) -> None:
        """Ray Serve replaces a replica of which this fails.

        Raises:
            RuntimeError: the engine has stopped.
        """
        if not self.stopping and self._watching is not None and not self.service.engine.alive:
            raise RuntimeError("the engine has stopped")

    # --- requests -------------------------------------------------------------------------------

    async def http(self, call: Call) -> Reply:
        """Answer one request."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": call.query,
            "root_path": "",
            "headers": call.headers,
            "client": None,
            "server": None,
        }
        sent = False
        status, headers, body = 500, [], bytearray()

        async def receive() -> Message:
            nonlocal sent
            if sent:  # a client that leaves cancels this call
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", []))
            else:
                body.extend(message.get("body", b""))

        await self.app(scope, receive, send)
        return Reply(status, headers, bytes(body), self.name)

    async def pause(self, call: Call, stream: str, everyone: bool) -> Reply:
        """Pause or resume by an admin's request; streams that are not in memory remember it too."""
        reply = await self.http(call)
        if reply.status == 200 and not everyone:
            if call.path.endswith("/pause"):
                self._paused_streams.add(stream)
            else:
                self._paused_streams.discard(stream)
        return reply

    # --- merging --------------------------------------------------------------------------------

    async def introduction(self) -> dict[str, Any]:
        """What a keeper that was restarted has to know."""
        assert self.merging is not None
        return {
            **self.merging.introduction(),
            "paused_all": self.service.engine.paused,
            "paused": sorted(self._paused_streams),
        }

    async def contribute(self, stream: str, version: int) -> Any:
        """What this replica has learnt from a stream since that version, or None."""
        assert self.merging is not None
        return await self.merging.contribute(stream, version)

    async def adopt(self, stream: str, version: int, state: Any, force: bool = False) -> None:
        """Go on from a merged state."""
        assert self.merging is not None
        await self.merging.adopt(stream, version, state, force)

    # --- the end --------------------------------------------------------------------------------

    async def stop(self) -> bool:
        """Answer what was accepted, save what was learnt; whether all could be saved."""
        if not self.stopping:
            self.stopping = True
            if self._watching is not None:
                self._watching.cancel()
            if self.merging is not None:
                await self.merging.leave()
            await self.service.stop()
        return bool(self.service.engine.saved)

    async def __del__(self) -> None:
        """Ray Serve awaits this when it takes a replica away."""
        if getattr(self, "_watching", None) is not None:
            await self.stop()

    async def _watch(self) -> None:
        """End the application when the process that started it is gone."""
        from ray import serve

        while True:
            await asyncio.sleep(5)
            try:
                self._keeper()
            except ValueError:
                now = time.monotonic()
                self._lost_since = self._lost_since or now
                if now - self._lost_since > ORPHANED:
                    log.error("the process that started this service is gone; ending it")
                    await self.stop()
                    context = serve.get_replica_context()
                    await asyncio.to_thread(serve.delete, context.app_name, _blocking=False)
                    return
            except Exception as error:  # the cluster is busy; look again later
                log.warning("cannot ask for the keeper: %s", error)
            else:
                self._lost_since = None


def _place(plan: Plan, shard: int) -> tuple[Settings, IO[str] | None]:
    """The settings with the folder of this replica's state, and that folder's lock."""
    settings = plan.settings
    if settings.state is None:
        return settings, None
    if plan.policy == "merged":  # the keeper keeps it
        return replace(settings, state=None), None
    if plan.policy == "by-stream":
        # All share one folder, since each stream is one replica's; so their number may change.
        return settings, hold(settings.state / f"shard-{shard}.lock", LOCK_WAIT)
    for number in range(10_000):
        folder = settings.state / f"replica-{number}"
        try:
            lock = hold(folder / "lock", 0)
        except TimeoutError:
            continue
        return replace(settings, state=folder), lock
    raise OSError(f"no free folder for a replica in {settings.state}")


def hold(path: Path, wait: float) -> IO[str]:
    """Lock a file until it is closed or the process ends, however it ends.

    Raises:
        TimeoutError: another process has held it for ``wait`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")  # not "w": whoever only tries must not erase the holder's number
    give_up = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= give_up:
                file.close()
                raise TimeoutError(f"{path} is held by another replica") from None
            time.sleep(0.2)
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file
