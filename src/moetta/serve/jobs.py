"""The bounded queue between the event loop and the engine: images wait here to become batches.

Time is monotonic throughout, so that a clock that jumps changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moetta.serve.refusal import Refusal
from moetta.serve.settings import Settings

Result = dict[str, Any] | Refusal
"""What is said about one image."""


class Ticket:
    """One request's images and the answers to them; lives on the event loop.

    Attributes:
        tenant: whose adapter answers.
        top_k: how many classes to name for each image.
        explain: also give entropy and experts.
        results: one entry per image, None until it is known.
        step: the updates of the tenant's adapter before it answered.
        done: set when every image has its result.
    """

    def __init__(self, tenant: str, images: int, top_k: int, explain: bool) -> None:
        self.tenant = tenant
        self.top_k = top_k
        self.explain = explain
        self.results: list[Result | None] = [None] * images
        self.step = 0
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._missing = images

    def put(self, index: int, result: Result) -> None:
        """Note one image's result; the first one counts. On the event loop only."""
        if self.results[index] is None:
            self.results[index] = result
            self._missing -= 1
            if not self._missing and not self.done.done():
                self.done.set_result(None)


@dataclass(eq=False)
class Job:
    """One image that waits.

    Attributes:
        ticket: the request that it belongs to.
        index: which of its images it is.
        pixels: uint8 [3, H, W].
        arrived: when it was accepted, in monotonic seconds.
        deadline: when it is dropped unless a batch has taken it.
    """

    ticket: Ticket
    index: int
    pixels: Tensor
    arrived: float
    deadline: float


Delivery = tuple[Job, Result, int]
"""A job, its result, and the adapter's step at that time."""


def deliver(deliveries: Sequence[Delivery]) -> None:
    """Hand results to their requests, from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for delivery in deliveries:
        by_loop.setdefault(delivery[0].ticket._loop, []).append(delivery)
    for loop, several in by_loop.items():
        loop.call_soon_threadsafe(_put_all, several)


def _put_all(deliveries: Sequence[Delivery]) -> None:
    for job, result, step in deliveries:
        job.ticket.step = step
        job.ticket.put(job.index, result)


@dataclass(frozen=True)
class Batch:
    """Images of one tenant that are answered together."""

    tenant: str
    jobs: list[Job]


Command = Callable[[], None]


class JobQueue:
    """Waiting images by tenant. Requests put and withdraw, the engine takes.

    Tenants take turns, so that a busy one cannot starve the others, and a batch never mixes them.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._tenants: OrderedDict[str, dict[Job, None]] = OrderedDict()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.size = 0
        """Images that wait."""
        self.seconds_per_image = 0.01
        """How long one image has taken lately; kept by the engine, read for Retry-After."""

    # --- requests -------------------------------------------------------------------------------

    def check(self, images: int = 1) -> None:
        """Refuse at once what could not be put now.

        Raises:
            Refusal: 503; the queue is full or closed.
        """
        if self._closed:
            raise Refusal(503, "the service is shutting down; try another one", retry_after=5)
        if self.size + images > self._settings.max_queue:
            raise Refusal(
                503,
                f"the queue is full ({self.size} of {self._settings.max_queue} images wait); "
                "try again later",
                retry_after=self.retry_after(),
            )

    def put(self, ticket: Ticket, images: Sequence[tuple[int, Tensor]]) -> list[Job]:
        """Accept all of a request's images, or none.

        Raises:
            Refusal: 503 if the queue is full or closed, 429 if this tenant has too many in it.
        """
        now = self._now()
        deadline = now + self._settings.queue_timeout
        jobs = [Job(ticket, index, pixels, now, deadline) for index, pixels in images]
        with self._changed:
            self.check(len(jobs))
            waiting = self._tenants.get(ticket.tenant)
            held = len(waiting) if waiting else 0
            if held + len(jobs) > self._settings.tenant_share:
                raise Refusal(
                    429,
                    f"{held} images of this stream wait already, and at most "
                    f"{self._settings.tenant_share} may; send them more slowly",
                    retry_after=self.retry_after(),
                )
            if waiting is None:
                waiting = self._tenants[ticket.tenant] = {}
            waiting.update(dict.fromkeys(jobs))
            self.size += len(jobs)
            # The engine waits for the first image, and then for a full batch; nothing in between.
            if held == 0 or len(waiting) >= self._settings.max_batch:
                self._changed.notify()
        return jobs

    def withdraw(self, jobs: Sequence[Job]) -> list[Job]:
        """Take back those that no batch has taken yet; returns them."""
        with self._changed:
            return [job for job in jobs if self._remove(job)]

    def _remove(self, job: Job) -> bool:
        waiting = self._tenants.get(job.ticket.tenant)
        if waiting is None or job not in waiting:
            return False
        del waiting[job]
        self.size -= 1
        if not waiting:
            del self._tenants[job.ticket.tenant]
        return True

    def retry_after(self) -> int:
        """Seconds until the images that wait now should be answered."""
        return min(60, max(1, math.ceil(self.size * self.seconds_per_image)))

    # --- the engine -----------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        """Have the engine call this between two batches.

        Raises:
            Refusal: 503; the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise Refusal(503, "the service is shutting down", retry_after=5)
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:
        """Accept nothing more; what waits is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout: float | None = None) -> Batch | Command | list[Job] | None:
        """Wait for the next thing to do.

        Returns:
            A command; a batch; a list of jobs whose time is up; an empty list after ``timeout``
            seconds without any of these; or None when the queue is closed and empty.
        """
        give_up = None if timeout is None else self._now() + timeout
        with self._changed:
            while True:
                if self._commands:
                    return self._commands.popleft()
                now = self._now()
                if late := self._late(now):
                    return late
                batch, wake = self._ready(now)
                if batch is not None:
                    return batch
                if self._closed:
                    return None
                if give_up is not None:
                    if now >= give_up:
                        return []
                    wake = give_up if wake is None else min(wake, give_up)
                self._changed.wait(None if wake is None else wake - now)

    def _late(self, now: float) -> list[Job]:
        # Images of a tenant are in order of arrival, and so of their deadlines.
        late: list[Job] = []
        for waiting in self._tenants.values():
            for job in waiting:
                if job.deadline > now:
                    break
                late.append(job)
        for job in late:
            self._remove(job)
        return late

    def _ready(self, now: float) -> tuple[Batch | None, float | None]:
        """A batch if a tenant has one ready, else when the next will be."""
        wake: float | None = None
        for tenant, waiting in self._tenants.items():
            ready = next(iter(waiting)).arrived + self._settings.max_wait_ms / 1000
            if self._closed or len(waiting) >= self._settings.max_batch or ready <= now:
                jobs = list(waiting)[: self._settings.max_batch]
                for job in jobs:
                    del waiting[job]
                self.size -= len(jobs)
                del self._tenants[tenant]
                if waiting:  # its next turn comes after everyone else's
                    self._tenants[tenant] = waiting
                return Batch(tenant, jobs), None
            wake = ready if wake is None else min(wake, ready)
        return None, wake
