"""Many replicas seen as one service: their metrics by label, their states added up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ADDED_ROWS = ("requests", "refused", "images", "batches", "learnt", "queue")
MEAN_ROWS = ("entropy", "concentration")


def shard(stream: str, shards: int) -> int:
    """The replica that a stream belongs to: always the same for the same number of replicas.

    By rendezvous hashing: with one replica more, only the streams that move to it move.

    >>> [shard(f"camera-{n}", 2) for n in range(4)] == [shard(f"camera-{n}", 2) for n in range(4)]
    True
    """

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{number} {stream}".encode()).digest()

    return max(range(shards), key=rank)


class _Labelled(Collector):
    """The metrics of several texts, each sample with the label of its text."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):
                    continue
                metric = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    metric.add_sample(sample.name, labels, sample.value)
        yield from found.values()


def metrics(texts: Mapping[str, str], own: CollectorRegistry) -> bytes:
    """Prometheus' text format of all replicas, by the label ``replica``, and of the front."""
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(own) + generate_latest(registry)


def state(
    found: Mapping[str, dict[str, Any]], uptime: float, since: float | None
) -> dict[str, Any]:
    """One service's state from the states of its replicas.

    Queue, streams and rows are sums (``known`` streams are the most that one replica knows of);
    ``stream`` is what the replica says that has seen most of that stream's images. Each replica's
    own state is in ``replicas``.
    """
    several = list(found.values())
    first = several[0]
    main = max(found, key=lambda name: found[name]["stream"].get("images", -1))
    reasons = dict.fromkeys(s["adapting"]["reason"] for s in several)
    return {
        **{key: first[key] for key in ("version", "model", "classes", "admin")},
        "ready": any(s["ready"] for s in several),
        "uptime": round(uptime, 1),
        "adapting": {
            "paused": all(s["adapting"]["paused"] for s in several),
            "reason": "; ".join(reasons),
        },
        "queue": {key: sum(s["queue"][key] for s in several) for key in first["queue"]},
        "streams": {
            "in_memory": sum(s["streams"]["in_memory"] for s in several),
            "known": max(s["streams"]["known"] for s in several),
            "limit": first["streams"]["limit"],
        },
        "stream": {**found[main]["stream"], "replica": main},
        "rows": [] if since is None else rows(several, uptime, since),
        "replicas": {
            name: {key: value for key, value in s.items() if key != "rows"}
            for name, s in found.items()
        },
    }


def rows(several: Sequence[dict[str, Any]], uptime: float, since: float) -> list[dict[str, Any]]:
    """One row per second of all replicas together, in the front's time.

    Replicas started at different times; what happened in the same second belongs together.
    Latencies are the worst of any replica.
    """
    seconds: dict[int, list[dict[str, Any]]] = {}
    for found in several:
        for row in found["rows"]:
            now = round(uptime - (found["uptime"] - row["t"]))
            seconds.setdefault(now, []).append(row)
    return [
        {"t": second, **_together(seconds[second])}
        for second in sorted(seconds)
        # The last second is left for later: some replicas may not have closed it yet.
        if since < second <= uptime - 2
    ]


def _together(several: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {key: sum(row[key] for row in several) for key in ADDED_ROWS}
    for key in ("p50", "p95", "p99"):
        out[key] = max((row[key] for row in several if row[key] is not None), default=None)
    for key in MEAN_ROWS:
        values = [row[key] for row in several if row[key] is not None]
        out[key] = round(sum(values) / len(values), 4) if values else None
    return out
