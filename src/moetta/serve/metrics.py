"""What the service counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from moetta.guard.events import ACTIONS

START_OVER = "start over"
"""What the service does itself about predictions that are not finite."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All metrics of one service, in a registry that belongs to it."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        ProcessCollector(registry=r)
        PlatformCollector(registry=r)
        self.requests = Counter(
            "moetta_requests_total", "Requests to /v1/predict, by status", ["status"], registry=r
        )
        self.latency = Histogram(
            "moetta_request_seconds",
            "From a request's headers to its answer, for those answered with 200",
            buckets=SECONDS,
            registry=r,
        )
        self.images = Counter(
            "moetta_images_total",
            "Images, by what became of them: answered, undecodable, refused, expired, abandoned, "
            "failed",
            ["outcome"],
            registry=r,
        )
        self.queue = Gauge("moetta_queue_images", "Images that wait", registry=r)
        self.queue_limit = Gauge("moetta_queue_limit_images", "Images that may wait", registry=r)
        self.queue_seconds = Histogram(
            "moetta_queue_seconds", "Time of images in the queue", buckets=SECONDS, registry=r
        )
        self.batch = Histogram(
            "moetta_batch_images", "Images per forward pass", buckets=IMAGES, registry=r
        )
        self.batches = Counter(
            "moetta_batches_total",
            "Batches, by whether they were learnt from: learnt, pooled (learnt from later, with "
            "others), pressure (too many images wait), paused, guard (it stopped learning), fixed "
            "(the method learns nothing), failed",
            ["learning"],
            registry=r,
        )
        self.forward = Histogram(
            "moetta_forward_seconds", "From a batch to its answers", buckets=SECONDS, registry=r
        )
        self.update = Histogram(
            "moetta_update_seconds", "Learning after the answers", buckets=SECONDS, registry=r
        )
        self.updates = Counter("moetta_updates_total", "Updates of all streams", registry=r)
        self.skipped = Counter(
            "moetta_updates_skipped_total",
            "Batches from which the method or the guard chose not to learn",
            registry=r,
        )
        self.entropy = Gauge(
            "moetta_entropy",
            "Mean entropy of recent predictions of all streams in memory, as a share of ln C",
            registry=r,
        )
        self.concentration = Gauge(
            "moetta_concentration",
            "Share of recent predictions in their stream's commonest class",
            registry=r,
        )
        self.guard = Counter(
            "moetta_guard_events_total", "Interventions of the guard", ["action"], registry=r
        )
        self.snapshots = Counter(
            "moetta_snapshots_total", "Snapshots, saved or failed", ["outcome"], registry=r
        )
        self.snapshot_time = Gauge(
            "moetta_snapshot_timestamp_seconds", "When a snapshot was last saved", registry=r
        )
        self.unsaved = Gauge(
            "moetta_unsaved_updates", "Updates since the last snapshot, at most", registry=r
        )
        self.tenants = Gauge("moetta_tenants", "Streams, by place", ["place"], registry=r)
        self.ready = Gauge("moetta_ready", "1 if the service accepts requests", registry=r)
        # From the start, since Prometheus takes the first value it sees for no increase.
        for status in ("200", "429", "503"):
            self.requests.labels(status)
        for action in (*ACTIONS, START_OVER):
            self.guard.labels(action)
        for outcome in ("saved", "failed"):
            self.snapshots.labels(outcome)
        for learning in ("learnt", "pooled", "pressure", "paused", "guard", "fixed", "failed"):
            self.batches.labels(learning)
        for outcome in ("answered", "undecodable", "refused", "expired", "abandoned", "failed"):
            self.images.labels(outcome)

    def saved(self, good: bool) -> None:
        """Count a snapshot."""
        self.snapshots.labels("saved" if good else "failed").inc()
        if good:
            self.snapshot_time.set_to_current_time()

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
