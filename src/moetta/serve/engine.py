"""One thread owns the adapters: it answers a batch, then learns from it.

The order of things is the point of this file. A batch that is large enough is answered from inside
the adapter's own call, before its update runs. A smaller one is answered without learning and put
into the tenant's pool, which is learnt from when it holds enough images. When too many images wait,
nothing is learnt at all.

Where an answer depends on the other images of its batch, as with a batch's statistics in BatchNorm
layers, a small batch is answered together with the tenant's latest images: alone, it would be
answered by statistics that no guard ever looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from moetta.serve import decode
from moetta.serve.answer import Answer, NotFinite
from moetta.serve.classifier import Classifier
from moetta.serve.company import latest, needs_company, with_company
from moetta.serve.jobs import Batch, Job, JobQueue, deliver
from moetta.serve.metrics import START_OVER, Metrics
from moetta.serve.refusal import Refusal
from moetta.serve.settings import Settings
from moetta.serve.tenant import DEFAULT, ON_DISK, PAUSED, WAITING, Tenant
from moetta.serve.tenants import Tenants
from moetta.serve.watch import Recent, Watch

log = logging.getLogger("moetta.serve")
T = TypeVar("T")
GIVE_WAY = 0.001
"""Seconds: about what the event loop takes to send an answer."""
PATIENCE = 0.5
"""Share of the queue's time-out that an update may take: nobody is refused because of learning."""
FORGET = 0.9
"""What is left of the time of the last update, each time that it was too long for another one."""
FAILED = Refusal(500, "the model failed on this batch; the log says why")


class Engine:
    """Takes batches from the queue until it is closed and empty."""

    def __init__(
        self,
        classifier: Classifier,
        tenants: Tenants,
        queue: JobQueue,
        settings: Settings,
        metrics: Metrics,
        watch: Watch,
    ) -> None:
        self.classifier = classifier
        self.tenants = tenants
        self.queue = queue
        self.settings = settings
        self.metrics = metrics
        self.watch = watch
        self.paused = False
        self.saved = False
        self.on_update: Callable[[Tenant], None] = lambda tenant: None
        """Called in the engine's thread after every update."""
        self.recent: dict[str, Recent] = {}
        self.in_company = False
        """Whether small batches are answered together with the tenant's latest images."""
        self.update_seconds = 0.0
        """How long an update has taken lately, for each of its images."""
        self._thread = threading.Thread(target=self._run, name="moetta-engine", daemon=True)

    # --- from other threads ---------------------------------------------------------------------

    def start(self) -> None:
        """Answer one made-up image, so that the first real one is not slow; then begin."""
        blank = decode.pixels(Image.new("RGB", (64, 64)), self.classifier.prepare)
        images = self.classifier.batch([blank])
        new = self.tenants.example()
        self.in_company = needs_company(new, self.classifier.source, images)
        tenant = self.tenants.get(DEFAULT)
        with tenant.answering.paused():
            logits = tenant.answering(images)
        if logits.shape[1] != len(self.classifier.labels):
            raise ValueError(
                f"the model has {logits.shape[1]} classes, but there are "
                f"{len(self.classifier.labels)} labels"
            )
        self._thread.start()

    def stop(self) -> None:
        """Answer everything that waits, save everything that was learnt, end."""
        self.queue.close()
        if self._thread.is_alive():
            self._thread.join()
        self.saved = self.tenants.close()
        if not self.saved:
            log.error("not everything that was learnt could be saved")

    def why(self, name: str) -> str:
        """Whether a tenant's last batch was learnt from and why not, in words."""
        if self.paused:
            return PAUSED
        tenant = self.tenants.peek(name)
        if tenant is None:
            return ON_DISK if self.tenants.is_known(name) and name != DEFAULT else WAITING
        return tenant.why

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two batches, in the thread that owns the adapters.

        Raises:
            Refusal: 503; the service is shutting down.
        """
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self.queue.command(command)
        return future

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self.queue.take()) is not None:
            try:
                if isinstance(work, Batch):
                    self._batch(work)
                elif isinstance(work, list):
                    self._expire(work)
                else:
                    work()
            except Exception:  # the answers are out; what failed is only the accounting after them
                log.exception("the engine failed after a batch, and goes on")

    def _expire(self, jobs: list[Job]) -> None:
        self.metrics.images.labels("expired").inc(len(jobs))
        late = self.late()
        deliver([(job, late, 0) for job in jobs])

    def late(self) -> Refusal:
        """What an image is told that waited too long."""
        return Refusal(
            503,
            f"not answered within {self.settings.queue_timeout:g} s; try again later",
            retry_after=self.queue.retry_after(),
        )

    def _batch(self, batch: Batch) -> None:
        begun = time.monotonic()
        answer = Answer(batch.jobs, self.classifier.labels, self.metrics, self._give_way)
        learning = "failed"
        try:
            tenant = self.tenants.get(batch.tenant)
            images = self.classifier.batch([job.pixels for job in batch.jobs])
            learning = self._learning(tenant, len(images))
            answer.tenant = tenant
            try:
                self._predict(tenant, images, answer, learning == "learnt")
            except NotFinite:
                learning = "failed"
                self._start_over(tenant)
                self._predict(tenant, images, answer, learn=False)
            if self.in_company:
                tenant.company = latest(tenant.company, images, self.settings.learn_samples)
            if learning == "pooled":
                self._pool(tenant, images)
            learning = self._became(tenant, learning)
        except Refusal as refusal:
            self.metrics.images.labels("refused").inc(len(batch.jobs))
            deliver([(job, refusal, 0) for job in batch.jobs])
        except Exception:
            # Whatever it is, the requests get their one answer and the thread goes on.
            learning = "failed"
            log.exception("a batch of %d images failed", len(batch.jobs))
            if not answer.given:
                self.metrics.images.labels("failed").inc(len(batch.jobs))
                deliver([(job, FAILED, 0) for job in batch.jobs])
        self._account(batch, answer, learning, begun)

    def _give_way(self) -> None:
        """If nobody waits, let the event loop send the answers before going on.

        Both share the interpreter, and the accounts (or an update) would slow it down.
        """
        if not self.queue.size:
            time.sleep(GIVE_WAY)

    def _predict(self, tenant: Tenant, images: Tensor, answer: Answer, learn: bool) -> None:
        tenant.answering.on_prediction = answer.early
        try:
            if learn:
                logits = self._learn(tenant, images)
            elif self.in_company and tenant.mode != "source":
                logits = self._in_company(tenant, images, answer)
            else:
                with tenant.answering.paused():
                    logits = tenant.answering(images)
        finally:
            tenant.answering.on_prediction = None
        if not answer.given:  # the guard had the last word, or the method has it only now
            answer(logits)

    def _in_company(self, tenant: Tenant, images: Tensor, answer: Answer) -> Tensor:
        joined = with_company(images, tenant.company, self.settings.learn_samples)
        if joined is None:
            answer.routed = False
            return self.classifier.source(images)
        with tenant.answering.paused():
            return tenant.answering(joined)

    def _start_over(self, tenant: Tenant) -> None:
        """The last line of defence: weights that give no numbers are worth nothing."""
        log.error("stream %s gave predictions that are not finite; it starts over", tenant.name)
        tenant.answering.reset()
        tenant.clear_pool()
        tenant.unsaved += 1
        self.metrics.guard.labels(START_OVER).inc()

    def _learning(self, tenant: Tenant, images: int) -> str:
        """What is done with a batch besides answering it, in one word."""
        waiting = self.queue.size + images  # with the batch itself, which waited too
        if not (tenant.learns or tenant.guarded):
            return "fixed"
        if self.paused or tenant.paused:
            return "paused"
        if waiting > self.settings.pressure:
            tenant.doing = (
                f"under pressure: {waiting} images wait, and above {self.settings.pressure} "
                "nothing is learnt"
            )
            return "pressure"
        size = images if images >= self.settings.learn_samples else tenant.pooled + images
        if size >= self.settings.learn_samples and (seconds := self._too_long(size)):
            tenant.clear_pool()
            tenant.doing = "learning"
            tenant.skipped = (
                f"an update takes {seconds:.1f} s, in which requests time out; "
                "lower --learn-samples, or raise --queue-timeout"
            )
            return "pressure"
        if images < self.settings.learn_samples:
            tenant.doing = f"learning; small batches are pooled into {self.settings.learn_samples}"
            return "pooled"
        tenant.doing = "learning"
        return "learnt"

    def _too_long(self, images: int) -> float | None:
        """How long an update on so many images would take, if that is too long for who waits."""
        seconds = self.update_seconds * images
        if seconds <= PATIENCE * self.settings.queue_timeout:
            return None
        self.update_seconds *= FORGET  # or one slow moment would end all learning
        return seconds

    def _became(self, tenant: Tenant, learning: str) -> str:
        """The same word, unless it turned out otherwise."""
        if learning not in ("learnt", "pooled"):
            return learning
        if tenant.mode != "adapt":
            return "guard"
        return learning if tenant.learns else "fixed"

    def _pool(self, tenant: Tenant, images: Tensor) -> None:
        """Keep answered images; learn from them when there are enough and nobody waits long."""
        tenant.pool.append(images)
        tenant.pooled += len(images)
        if tenant.pooled >= self.settings.learn_samples:
            pooled = torch.cat(tenant.pool)
            tenant.clear_pool()
            begun = time.monotonic()
            self._learn(tenant, pooled)
            self.metrics.update.observe(time.monotonic() - begun)

    def _learn(self, tenant: Tenant, images: Tensor) -> Tensor:
        begun = time.monotonic()
        with tenant.adapter.lock:  # a snapshot sees what is around the adapter before or after too
            logits = tenant.answering(images)
        self.update_seconds = (time.monotonic() - begun) / len(images)
        tenant.unsaved += 1
        self.on_update(tenant)
        last = tenant.answering.last
        tenant.skipped = None if last is None else last.skipped
        if tenant.skipped is not None:
            self.metrics.skipped.inc()
        elif tenant.learns:
            self.metrics.updates.inc()
        return logits

    def _account(self, batch: Batch, answer: Answer, learning: str, begun: float) -> None:
        now = time.monotonic()
        metrics = self.metrics
        metrics.batches.labels(learning).inc()
        metrics.batch.observe(len(batch.jobs))
        for job in batch.jobs:
            metrics.queue_seconds.observe(begun - job.arrived)
        if answer.given:
            metrics.forward.observe(answer.given - begun)
        if learning == "learnt":
            metrics.update.observe(now - answer.given)
        # A slow mean: one slow batch should not frighten clients away for a minute.
        seconds = (now - begun) / len(batch.jobs)
        self.queue.seconds_per_image += 0.1 * (seconds - self.queue.seconds_per_image)
        self.watch.batch(len(batch.jobs), learning in ("learnt", "pooled"))
        tenant = answer.tenant
        if tenant is not None and answer.given:
            tenant.answered += len(batch.jobs)
            recent = self.recent.get(tenant.name)
            if recent is None:
                experts = tenant.adapter.expert_counts()
                recent = self.recent[tenant.name] = Recent(len(self.classifier.labels), experts)
            recent.add(answer.classes, answer.entropy, answer.routing)
            self._count_events(tenant)
            self.tenants.save_if_due(tenant)
            metrics.unsaved.set(max(t.unsaved for t in self.tenants))
            if len(self.recent) > len(self.tenants):
                here = {t.name for t in self.tenants}
                self.recent = {k: v for k, v in self.recent.items() if k in here}

    def _count_events(self, tenant: Tenant) -> None:
        """Count what the guard did since the last batch; it logs the reason, but not for whom."""
        counts = Counter[str](getattr(tenant.answering, "counts", {}))
        if counts != tenant.counted:
            for action, count in (counts - tenant.counted).items():
                if ":" not in action:  # the others are the same ones by reason
                    self.metrics.guard.labels(action).inc(count)
                    log.warning("stream %s: %s by its guard", tenant.name, action)
            tenant.counted = counts
