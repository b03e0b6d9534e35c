"""The parts of a running service, put together, and what it can say about itself."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from PIL import Image
from starlette.concurrency import run_in_threadpool

from moetta import __version__
from moetta.serve import decode
from moetta.serve.bodies import Buffers, Part
from moetta.serve.classifier import Classifier
from moetta.serve.engine import Engine
from moetta.serve.jobs import Job, JobQueue, Ticket
from moetta.serve.metrics import Metrics
from moetta.serve.refusal import ClientLeft, Refusal
from moetta.serve.settings import Settings
from moetta.serve.tenant import DEFAULT, Build, Tenant
from moetta.serve.tenants import Tenants
from moetta.serve.watch import Watch, together

log = logging.getLogger("moetta.serve")
T = TypeVar("T")


class Service:
    """Everything between a request's body and its answer.

    Attributes:
        draining: nothing more is accepted.
        accepted: requests whose images were queued.
        answered: those of them whose every image got its result; clients that left did not wait.
    """

    def __init__(self, classifier: Classifier, build: Build, settings: Settings) -> None:
        self.classifier = classifier
        self.settings = settings
        self.metrics = Metrics()
        self.metrics.queue_limit.set(settings.max_queue)
        self.watch = Watch()
        self.queue = JobQueue(settings)
        self.buffers = Buffers(settings.max_buffered)
        self.tenants = Tenants(build, settings, self.metrics.saved)
        self.engine = Engine(
            classifier, self.tenants, self.queue, settings, self.metrics, self.watch
        )
        self.draining = False
        self.accepted = 0
        self.answered = 0
        self._decoders = ThreadPoolExecutor(
            settings.decode_threads, thread_name_prefix="moetta-decode"
        )
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Warm up and begin to answer."""
        await run_in_threadpool(self.engine.start)
        self._ticker = asyncio.create_task(self._tick())
        self.metrics.ready.set(1)
        log.info("ready: %s", self.describe())

    async def stop(self) -> None:
        """Answer what was accepted, save what was learnt."""
        self.drain()
        if self._ticker is not None:
            self._ticker.cancel()
        await run_in_threadpool(self.engine.stop)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        log.info(
            "stopped: %d requests accepted, %d answered, %d left before their answer",
            self.accepted,
            self.answered,
            self.accepted - self.answered,
        )

    def drain(self) -> None:
        """Accept nothing more. Called from a signal handler too, so it takes no lock."""
        self.draining = True
        self.metrics.ready.set(0)

    @property
    def saved(self) -> bool:
        """Whether, after the end, everything that was learnt is saved."""
        return self.engine.saved

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and answered."""
        return self.engine.alive and not self.draining

    def describe(self) -> str:
        """One line for the log."""
        default = self.tenants.peek(DEFAULT)
        step = "" if default is None else f" at step {default.answering.steps}"
        return f"{self.classifier.name}, {len(self.classifier.labels)} classes{step}"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1)
            recent = self.engine.recent  # replaced, not emptied, when streams leave
            self.watch.tick(self.queue.size, {name: one.seen for name, one in list(recent.items())})
            self.refresh()

    def refresh(self) -> None:
        """Bring the gauges up to date."""
        self.metrics.queue.set(self.queue.size)
        self.metrics.tenants.labels("memory").set(len(self.tenants))
        self.metrics.tenants.labels("known").set(self.tenants.known)
        entropy, concentration = together(list(self.engine.recent.values()))
        if entropy is not None and concentration is not None:
            self.metrics.entropy.set(entropy / self.max_entropy)
            self.metrics.concentration.set(concentration)

    @property
    def max_entropy(self) -> float:
        """The entropy of knowing nothing."""
        return math.log(max(2, len(self.classifier.labels)))

    # --- predicting -----------------------------------------------------------------------------

    async def predict(self, ticket: Ticket, parts: list[Part], left: asyncio.Task[None]) -> None:
        """Decode, queue and wait for the answers, which end up in the ticket.

        Raises:
            Refusal: there is no room, or nothing came of it in time.
            ClientLeft: the client did not wait.
        """
        images = []
        for index, part in enumerate(parts):
            try:
                images.append((index, await self._decode(part)))
            except Refusal as refusal:
                self.metrics.images.labels("undecodable").inc()
                ticket.put(index, refusal)
        if not images:
            return
        if left.done():
            self.metrics.images.labels("abandoned").inc(len(images))
            raise ClientLeft
        try:
            jobs = self.queue.put(ticket, images)
        except Refusal:
            self.metrics.images.labels("refused").inc(len(images))
            raise
        self.accepted += 1
        try:
            await self._answered(ticket, left, self.settings.queue_timeout)
            if not ticket.done.done():
                self._give_up(jobs)
                await self._answered(ticket, left, None)
            self.answered += 1
        finally:
            if not ticket.done.done():  # the client left, or the server is being stopped hard
                gone = self.queue.withdraw(jobs)
                self.metrics.images.labels("abandoned").inc(len(gone))

    async def _answered(
        self, ticket: Ticket, left: asyncio.Task[None], timeout: float | None
    ) -> None:
        await asyncio.wait(
            (ticket.done, left), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if left.done() and not ticket.done.done():
            raise ClientLeft

    def _give_up(self, jobs: list[Job]) -> None:
        """Take back what has waited too long; what is in a batch by now will be answered soon."""
        late = self.engine.late()
        for job in self.queue.withdraw(jobs):
            self.metrics.images.labels("expired").inc()
            job.ticket.put(job.index, late)

    async def _decode(self, part: Part) -> Any:
        if isinstance(part, Refusal):
            raise part
        image = decode.open_image(part, self.settings.max_pixels)
        if image.width * image.height <= decode.QUICK_PIXELS:
            return decode.pixels(image, self.classifier.prepare)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, self._pixels, image)

    def _pixels(self, image: Image.Image) -> Any:
        return decode.pixels(image, self.classifier.prepare)

    # --- operating ------------------------------------------------------------------------------

    async def with_tenant(self, name: str, function: Callable[[Tenant], T]) -> T:
        """Call a function with a tenant, between two batches, in the engine's thread."""
        future = self.engine.call(lambda: function(self.tenants.get(name)))
        return await asyncio.wrap_future(future)

    def state(self, name: str = DEFAULT, since: float | None = None) -> dict[str, Any]:
        """What is true now of the service and of one tenant, and the seconds after ``since``."""
        tenant = self.tenants.peek(name)
        paused = self.engine.paused or (tenant is not None and tenant.paused)
        return {
            "version": __version__,
            "model": self.classifier.name,
            "classes": len(self.classifier.labels),
            "ready": self.ready,
            "uptime": round(time.monotonic() - self.watch.started, 1),
            "adapting": {
                "paused": paused,
                "reason": "shutting down" if self.draining else self.engine.why(name),
            },
            "queue": {
                "images": self.queue.size,
                "limit": self.settings.max_queue,
                "learning_stops_above": self.settings.pressure,
            },
            "streams": {
                "in_memory": len(self.tenants),
                "known": self.tenants.known,
                "limit": self.settings.max_tenants,
            },
            "admin": self.settings.admin_token is not None,
            "stream": self._stream(name),
            "rows": [] if since is None else self.watch.since(since, name),
        }

    def _stream(self, name: str) -> dict[str, Any]:
        tenant = self.tenants.peek(name)
        if tenant is None:  # on disk, or new; looking at it does not bring it back
            return {"name": name, "in_memory": False}
        recent = self.engine.recent.get(name)
        events = list(getattr(tenant.answering, "events", ()))
        return {
            "name": name,
            "in_memory": True,
            "method": tenant.adapter.method,
            "guarded": tenant.guarded,
            "step": tenant.answering.steps,
            "paused": tenant.paused,
            "pool": {"images": tenant.pooled, "needed": self.settings.learn_samples},
            "images": tenant.answered,
            "images_learnt_from": tenant.adapter.totals.selected,
            "entropy": None if recent is None else recent.mean_entropy,
            "max_entropy": self.max_entropy,
            "concentration": None if recent is None else recent.concentration,
            "expert_load": {} if recent is None else recent.load(),
            "guard_events": [_event(event) for event in events[-20:]],
            "snapshots": [] if tenant.snapshots is None else tenant.snapshots.numbers,
            "unsaved_updates": tenant.unsaved,
        }


def _event(event: Any) -> dict[str, Any]:
    """A guard's event as plain JSON data."""
    found = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(event).items()
    }
    text = f"update {event.step}: {event.action}"
    if event.reason:
        text += f" because of {event.reason} ({event.value:.3g}, threshold {event.threshold:.3g})"
    return {**found, "text": text}
