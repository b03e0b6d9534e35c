"""The HTTP side of the service on Ray: bounds and checks here, every answer from a replica.

It runs in the process that `moetta serve --ray` is, so that a dying replica costs its requests a
503 with Retry-After and never the connection, and so that SIGTERM means the same as without Ray.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from moetta.serve import access, ray_views
from moetta.serve.app import REQUEST_ID
from moetta.serve.bodies import Buffers, read_body
from moetta.serve.metrics import SECONDS
from moetta.serve.ray_fleet import Fleet
from moetta.serve.ray_replica import Call, Policy, Reply
from moetta.serve.refusal import ClientLeft, Refusal
from moetta.serve.settings import Settings
from moetta.serve.tenant import tenant_name

log = logging.getLogger("moetta.serve")
COMPUTE = 15.0
"""Seconds that an answer may take beyond its time in the queue."""
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "content-length"})


class Front:
    """Takes requests to replicas and their answers back.

    Args:
        settings: the service's.
        policy: what replicas share.
        deploy: starts the replicas; returns their handles (one per stream's share, else one for
            all) and the keeper.
        stop: ends the replicas, after they have saved.

    Attributes:
        draining: nothing more is accepted.
        saved: after the end, whether everything that was learnt is saved.
        accepted: requests to /v1/predict that were handed to a replica.
        left: those of them whose client did not wait for the answer.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        deploy: Callable[[Front], tuple[list[Any], Any]],
        stop: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.draining = False
        self.saved = False
        self.accepted = 0
        self.left = 0
        self._deploy = deploy
        self._end = stop
        self._fleet = Fleet(policy)
        self._buffers = Buffers(settings.max_buffered)
        self._started = time.monotonic()
        r = self._registry = CollectorRegistry()
        self._requests = Counter(
            "moetta_front_requests_total",
            "Requests to /v1/predict as clients saw them, by status",
            ["status"],
            registry=r,
        )
        self._latency = Histogram(
            "moetta_front_request_seconds",
            "From a request's headers to its answer, for those answered with 200",
            buckets=SECONDS,
            registry=r,
        )
        answering = Gauge(
            "moetta_front_replicas", "Replicas that answered when last asked", registry=r
        )
        answering.set_function(lambda: self._fleet.answering)

    # --- start and end --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the replicas."""
        fleet = self._fleet
        fleet.handles, fleet.keeper = await run_in_threadpool(self._deploy, self)
        self._started = time.monotonic()

    async def stop(self) -> None:
        """Merge, save, and end the replicas; every accepted request was answered before."""
        self.drain()
        if not self._fleet.handles:
            return
        self.saved = await self._fleet.finish()
        await run_in_threadpool(self._end)
        log.info(
            "stopped: %d requests accepted, %d answered, %d left before their answer",
            self.accepted,
            self.accepted - self.left,
            self.left,
        )

    def drain(self) -> None:
        """Accept nothing more."""
        self.draining = True

    # --- requests -------------------------------------------------------------------------------

    async def answer(self, request: Request, request_id: str) -> Reply:
        """The answer to a request.

        Raises:
            Refusal: there is none.
            ClientLeft: nobody waits for one.
        """
        scope = request.scope
        path, method = scope["path"], scope["method"]
        access.check_host(request.headers, self.settings)
        if path.startswith("/v1/"):
            access.check_key(request.headers, self.settings)
        if self.draining and (path in ("/readyz", "/v1/predict")):
            raise Refusal(503, "the service is shutting down", retry_after=5)
        call = Call(method, path, scope["query_string"], _headers(scope, request_id))
        if method == "GET" and path == "/metrics":
            return await self._metrics(call)
        stream = request.headers.get("x-stream-id")
        if method == "GET" and path == "/v1/state":
            return await self._state(call, tenant_name(stream))
        if method == "POST" and path.startswith("/v1/adapt/"):
            access.check_admin(request.headers, self.settings)
            return await self._admin(call, path.removeprefix("/v1/adapt/"), tenant_name(stream))
        name = tenant_name(stream) if path == "/v1/predict" else "default"
        with self._buffers.hold() as hold:
            body = await read_body(request, self.settings, hold)
            call = Call(method, path, scope["query_string"], call.headers, body)
            limit = self.settings.queue_timeout + COMPUTE
            if path != "/v1/predict":
                return await self._fleet.one(call, name, request, limit)
            self.accepted += 1
            try:
                return await self._fleet.one(call, name, request, limit)
            except ClientLeft:
                self.left += 1
                raise

    # --- asked of all ---------------------------------------------------------------------------

    async def _metrics(self, call: Call) -> Reply:
        replies = await self._fleet.replies("http", call)
        texts = {r.replica: r.body.decode() for r in replies if r.status == 200}
        body = ray_views.metrics(texts, self._registry)
        return Reply(200, [(b"content-type", b"text/plain; version=0.0.4")], body)

    async def _state(self, call: Call, stream: str) -> Reply:
        uptime = time.monotonic() - self._started
        since = _float(parse_qs(call.query.decode("latin-1")).get("since", [""])[0])
        # Replicas count from their own start: all of their rows are asked for.
        query = call.query if since is None else b"since=-1"
        replies = await self._fleet.replies("http", Call("GET", call.path, query, call.headers))
        good = {r.replica: json.loads(r.body) for r in replies if r.status == 200}
        if not good:
            return replies[0]
        found = ray_views.state(good, uptime, since)
        found["policy"] = self.policy
        if self.draining:
            found["ready"] = False
        if self.policy == "by-stream":
            found["stream"]["shard"] = self._fleet.shard(stream)
        if self.policy == "merged":
            with suppress(Refusal):
                facts = await self._fleet.ask_keeper("facts", stream)
                found["merged"] = facts
                found["stream"]["snapshots"] = facts["snapshots"]
        return _json(200, found)

    async def _admin(self, call: Call, what: str, stream: str) -> Reply:
        query = parse_qs(call.query.decode("latin-1"))
        everyone = query.get("all", ["false"])[0].lower() in ("1", "true", "yes", "on")
        if what in ("pause", "resume"):
            replies = await self._fleet.owners("pause", stream, everyone, call, stream, everyone)
            if any(reply.status == 200 for reply in replies):
                await self._fleet.ask_keeper("pause", stream, everyone, what == "pause")
        elif self.policy == "merged" and what in ("reset", "snapshot", "rollback"):
            return await self._merged_admin(what, stream, query)
        else:
            replies = await self._fleet.owners("http", stream, False, call)
        worst = max(replies, key=lambda reply: reply.status)
        if worst.status != 200:
            return worst
        found = json.loads(worst.body)
        found["replicas"] = {r.replica: json.loads(r.body) for r in replies}
        log.warning("admin: %s of stream %s on %d replicas", what, stream, len(replies))
        return _json(200, found)

    async def _merged_admin(self, what: str, stream: str, query: dict[str, list[str]]) -> Reply:
        number, to = [], None
        if what == "rollback":
            to = query.get("to", [None])[0]
            if to is not None and not (to.isdecimal() and int(to) > 0):
                raise Refusal(422, f"to must be the number of a snapshot, got {to[:40]!r}")
            number = [None if to is None else int(to)]
        found = await self._fleet.ask_keeper(what, stream, *number)
        if found is None:
            which = "no good snapshot" if to is None else f"no good snapshot {to}"
            raise Refusal(409, f"there is {which} of this stream to roll back to")
        pauses = await self._fleet.ask_keeper("pauses")
        log.warning("admin: %s of stream %s on all replicas", what, stream)
        paused = pauses["all"] or stream in pauses["streams"]
        return _json(200, {"stream": stream, "paused": paused, **found})

    def count(self, status: int, seconds: float) -> None:
        """Count a request to /v1/predict."""
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._latency.observe(seconds)


def create_front(
    settings: Settings,
    policy: Policy,
    deploy: Callable[[Front], tuple[list[Any], Any]],
    stop: Callable[[], None],
) -> Starlette:
    """The front as an ASGI application; replicas start and end with its lifespan."""
    front = Front(settings, policy, deploy, stop)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await front.start()
        yield
        await front.stop()

    app = Starlette(lifespan=lifespan)
    app.state.service = front
    app.add_middleware(Gate, front=front)
    return app


class Gate:
    """Answers every HTTP request through the front."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        predicting = scope["path"] == "/v1/predict" and scope["method"] == "POST"
        status = 499
        try:
            try:
                reply = await self._front.answer(request, request_id)
            except Refusal as refusal:
                reply = _refused(refusal, request_id)
            except ClientLeft:
                return
            status = reply.status
            headers = [(k, v) for k, v in reply.headers if k.decode("latin-1") not in HOP]
            if not any(k == b"x-request-id" for k, _ in headers):
                headers.append((b"x-request-id", request_id.encode()))
            headers.append((b"content-length", b"%d" % len(reply.body)))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = b"" if scope["method"] == "HEAD" else reply.body
            await send({"type": "http.response.body", "body": body})
        finally:
            if predicting:
                self._front.count(status, time.monotonic() - begun)


def _headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    kept = [(k, v) for k, v in scope["headers"] if k not in (b"x-request-id", b"content-length")]
    return [*kept, (b"x-request-id", request_id.encode())]


def _json(status: int, content: Any) -> Reply:
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-cache")]
    return Reply(status, headers, json.dumps(content).encode())


def _refused(refusal: Refusal, request_id: str) -> Reply:
    reply = _json(refusal.status, {"error": refusal.reason, "request_id": request_id})
    more = [(k.lower().encode(), v.encode()) for k, v in refusal.headers.items()]
    return Reply(reply.status, [*reply.headers, *more], reply.body)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
