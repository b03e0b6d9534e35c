"""Many replicas seen as one service."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from moetta.serve.metrics import Metrics
from moetta.serve.ray_views import metrics, rows, shard, state


def test_metrics_keep_their_values_and_get_a_label() -> None:
    texts = {}
    for number, name in enumerate(("one", "two"), 1):
        found = Metrics()
        found.requests.labels("200").inc(10 * number)
        found.latency.observe(0.02)
        texts[name] = found.text().decode()
    own = CollectorRegistry()
    Counter("front_total", "mine", registry=own).inc(3)
    text = metrics(texts, own).decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}  # it is well formed
    values = {
        tuple(sorted(s.labels.items())): s.value
        for s in families["moetta_requests"].samples
        if s.name == "moetta_requests_total" and s.labels["status"] == "200"
    }
    assert values == {
        (("replica", "one"), ("status", "200")): 10,
        (("replica", "two"), ("status", "200")): 20,
    }
    assert families["moetta_request_seconds"].type == "histogram"
    assert families["front"].samples[0].value == 3
    assert text.count("# TYPE moetta_requests_total counter") == 1


def row(t: float, requests: int, entropy: float | None = 1.0) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("requests", "refused", "images", "batches", "learnt", "queue"), requests
    )
    times = {"p50": float(requests), "p95": None, "p99": None}
    return {"t": t, **counts, **times, "entropy": entropy, "concentration": None}


def test_rows_of_the_same_second_add_up_whenever_a_replica_started() -> None:
    old = {"uptime": 100.0, "rows": [row(96.0, 1), row(97.0, 2), row(99.9, 50)]}
    new = {"uptime": 10.0, "rows": [row(6.0, 10, None), row(7.0, 20, 3.0)]}
    found = rows([old, new], uptime=50.0, since=0.0)
    assert [r["t"] for r in found] == [46, 47]  # the last seconds are not over
    assert [r["requests"] for r in found] == [11, 22]
    assert [r["entropy"] for r in found] == [1.0, 2.0]
    assert [r["p50"] for r in found] == [10, 20]
    assert rows([old, new], uptime=50.0, since=46.0)[0]["t"] == 47


def replica(images: int | None, paused: bool, reason: str) -> dict[str, Any]:
    stream = {"name": "a", "in_memory": images is not None}
    return {
        "version": "1",
        "model": "m",
        "classes": 5,
        "ready": True,
        "uptime": 5.0,
        "adapting": {"paused": paused, "reason": reason},
        "queue": {"images": 2, "limit": 10, "learning_stops_above": 5},
        "streams": {"in_memory": 1, "known": 3, "limit": 9},
        "admin": True,
        "stream": stream if images is None else {**stream, "images": images},
        "rows": [],
    }


def test_states_add_up() -> None:
    found = state(
        {"x": replica(None, True, "paused"), "y": replica(7, False, "learning")}, 9.0, None
    )
    assert found["queue"] == {"images": 4, "limit": 20, "learning_stops_above": 10}
    assert found["streams"] == {"in_memory": 2, "known": 3, "limit": 9}
    assert found["stream"]["replica"] == "y"
    assert found["adapting"] == {"paused": False, "reason": "paused; learning"}
    assert set(found["replicas"]) == {"x", "y"}
    assert found["rows"] == []


@given(st.text(max_size=20), st.integers(1, 12))
def test_one_replica_more_moves_streams_only_to_it(stream: str, shards: int) -> None:
    before, after = shard(stream, shards), shard(stream, shards + 1)
    assert 0 <= before < shards
    assert after in (before, shards)


def test_streams_are_spread_evenly() -> None:
    counts = [0] * 4
    for number in range(1000):
        counts[shard(f"camera-{number}", 4)] += 1
    assert min(counts) > 180
