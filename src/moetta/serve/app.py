"""The routes: thin, each a few lines over the service."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetta import __version__
from moetta.serve import access, admin, openapi
from moetta.serve.bodies import read_body, split
from moetta.serve.classifier import Classifier
from moetta.serve.jobs import Ticket
from moetta.serve.openapi import StreamId
from moetta.serve.refusal import ClientLeft, Refusal
from moetta.serve.service import Service
from moetta.serve.settings import Settings
from moetta.serve.tenant import NAME_RULE, Build, tenant_name

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/docs": ("docs.html", "text/html"),
    "/docs.js": ("docs.js", "text/javascript"),
}
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(classifier: Classifier, build: Build, settings: Settings) -> FastAPI:
    """The service as an ASGI application; it starts and stops with its lifespan.

    Args:
        classifier: what is served.
        build: makes the adapter of a new tenant.
        settings: the bounds.
    """
    service = Service(classifier, build, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="moetta",
        version=__version__,
        summary="An image classifier that keeps learning, without labels, from what it classifies",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ours do not
        redoc_url=None,
    )
    app.state.service = service
    _predict(app, service)
    _observe(app, service)
    admin.add_routes(app, service)
    _pages(app)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, service=service)
    return app


def _predict(app: FastAPI, service: Service) -> None:
    settings = service.settings

    @app.post(
        "/v1/predict",
        response_model=openapi.Predictions,
        responses=openapi.refusals(401, 408, 413, 415, 422, 429, 500, 503),
        openapi_extra=openapi.PREDICT_BODY,
        tags=["predict"],
        summary="Classify one image or several",
    )
    async def predict(
        request: Request,
        stream: StreamId = None,
        top_k: Annotated[int, Query(ge=1, le=1000, description="classes per image")] = 5,
        explain: Annotated[bool, Query(description="add entropy and experts")] = False,
    ) -> Response:
        tenant = tenant_name(stream)
        service.tenants.may_exist(tenant)
        with service.buffers.hold() as hold:
            body = await read_body(request, settings, hold)
            parts = split(body, request.headers.get("content-type", ""), settings.max_images)
            del body
            ticket = Ticket(tenant, len(parts), top_k, explain)
            left = asyncio.create_task(_left(request))
            try:
                await service.predict(ticket, parts, left)
            finally:
                left.cancel()
        return _answer(ticket, request.scope["request_id"])


async def _left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(ticket: Ticket, request_id: str) -> Response:
    failed = [result for result in ticket.results if isinstance(result, Refusal)]
    if len(failed) == len(ticket.results):
        # Where nothing came of it, the answer is the refusal itself.
        raise max(failed, key=lambda refusal: refusal.status)
    predictions = [
        {"error": result.reason, "status": result.status} if isinstance(result, Refusal) else result
        for result in ticket.results
    ]
    return JSONResponse(
        {
            "request_id": request_id,
            "stream": ticket.tenant,
            "step": ticket.step,
            "predictions": predictions,
        }
    )


def _observe(app: FastAPI, service: Service) -> None:
    @app.get(
        "/healthz", response_model=openapi.Alive, responses=openapi.refusals(503), tags=["observe"]
    )
    async def healthz() -> Response:
        """The process runs, and so does the thread that answers."""
        if not service.engine.alive:
            raise Refusal(503, "the engine has stopped", retry_after=5)
        return JSONResponse({"status": "ok"})

    @app.get(
        "/readyz", response_model=openapi.Alive, responses=openapi.refusals(503), tags=["observe"]
    )
    async def readyz() -> Response:
        """Requests are accepted: send traffic here."""
        if not service.ready:
            raise Refusal(503, "shutting down", retry_after=5)
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **openapi.refusals(),
        },
        tags=["observe"],
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        service.refresh()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/state", responses=openapi.refusals(401, 422), tags=["observe"])
    async def state(
        stream: StreamId = None,
        since: Annotated[
            float | None, Query(description="also give one row per second after this uptime")
        ] = None,
    ) -> dict[str, Any]:
        """What the service does now, and how a stream fares."""
        return service.state(tenant_name(stream), since)


def _pages(app: FastAPI) -> None:
    folder = files("moetta.serve").joinpath("page")
    for path, (name, kind) in PAGE.items():
        content = folder.joinpath(name).read_bytes()

        def page(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers=SECURITY)

        app.add_api_route(path, page, include_in_schema=False, methods=["GET"])


# --- errors -------------------------------------------------------------------------------------


def _problem(request: Request, status: int, reason: str, headers: dict[str, str]) -> Response:
    content = {"error": reason, "request_id": request.scope.get("request_id")}
    return JSONResponse(content, status, headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _problem(request, error.status, error.reason, error.headers)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # What was sent is not repeated: it may be anything.
    reasons = [
        NAME_RULE
        if "X-Stream-Id" in e["loc"]
        else f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}"
        for e in error.errors()
    ]
    return _problem(request, 422, "; ".join(reasons), {})


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return _problem(request, error.status_code, str(error.detail).lower(), headers)


class Gate:
    """The outermost layer: checks who calls, refuses early what has no room, counts everything.

    Plain ASGI, since under overload most requests end here and must cost little.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        predicting = scope["path"] == "/v1/predict" and scope["method"] == "POST"
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            self._check(scope["path"], headers, predicting)
            await self._app(scope, receive, counted)
        except Refusal as refusal:
            await _send_refusal(refusal, request_id, counted)
        except ClientLeft:
            status = 499  # nobody reads an answer; the number is the one that proxies use
        finally:
            if predicting:
                self._count(status, time.monotonic() - begun)

    def _check(self, path: str, headers: Headers, predicting: bool) -> None:
        settings = self._service.settings
        access.check_host(headers, settings)
        if path.startswith("/v1/"):
            access.check_key(headers, settings)
        if predicting:
            if self._service.draining:
                raise Refusal(503, "the service is shutting down", retry_after=5)
            self._service.queue.check()

    def _count(self, status: int, seconds: float) -> None:
        service = self._service
        service.metrics.requests.labels(str(status)).inc()
        if status == 200:
            service.metrics.latency.observe(seconds)
            service.watch.answered(seconds)
        elif status in (429, 503):
            service.watch.refused()


async def _send_refusal(refusal: Refusal, request_id: str, send: Send) -> None:
    body = json.dumps({"error": refusal.reason, "request_id": request_id}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.lower().encode(), v.encode()) for k, v in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
