"""The admin calls: stop learning, go on, start over, save, go back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.params import Depends
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response

from moetta.serve import openapi
from moetta.serve.access import check_admin
from moetta.serve.openapi import StreamId
from moetta.serve.refusal import Refusal
from moetta.serve.service import Service
from moetta.serve.tenant import Tenant, tenant_name

log = logging.getLogger("moetta.serve")
Handler = TypeVar("Handler", bound=Callable[..., Any])
Everyone = Annotated[bool, Query(alias="all", description="every stream, not only this one")]


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the calls below /v1/adapt."""

    async def admin(request: Request) -> None:
        check_admin(request.headers, service.settings)

    def done(tenant: Tenant, snapshot: int | None = None) -> dict[str, Any]:
        paused = service.engine.paused or tenant.paused
        step = tenant.answering.steps
        return {"stream": tenant.name, "step": step, "paused": paused, "snapshot": snapshot}

    def route(path: str, *statuses: int) -> Callable[[Handler], Handler]:
        return app.post(
            f"/v1/adapt/{path}",
            response_model=openapi.Done,
            responses=openapi.refusals(401, 422, 429, 503, *statuses),
            dependencies=[
                Depends(HTTPBearer(auto_error=False, description="the admin token")),
                Depends(admin),
            ],
            tags=["admin"],
        )

    @route("pause")
    async def pause(stream: StreamId = None, everyone: Everyone = False) -> Response:
        """Answer without learning, until resume."""
        return await _set_paused(True, stream, everyone)

    @route("resume")
    async def resume(stream: StreamId = None, everyone: Everyone = False) -> Response:
        """Learn again."""
        return await _set_paused(False, stream, everyone)

    async def _set_paused(paused: bool, stream: str | None, everyone: bool) -> Response:
        def change(tenant: Tenant) -> dict[str, Any]:
            if everyone:
                service.engine.paused = paused
            else:
                tenant.paused = paused
            return done(tenant)

        found = await service.with_tenant(tenant_name(stream), change)
        which = "all streams" if everyone else f"stream {found['stream']}"
        log.warning("admin: %s %s", "paused" if paused else "resumed", which)
        return JSONResponse(found)

    @route("reset", 507)
    async def reset(stream: StreamId = None) -> Response:
        """Return to the source model; the states saved before stay on disk until they age out."""

        def change(tenant: Tenant) -> dict[str, Any]:
            tenant.answering.reset()
            tenant.clear_pool()
            tenant.unsaved += 1
            return done(tenant, _save(service, tenant))

        found = await service.with_tenant(tenant_name(stream), change)
        log.warning("admin: reset stream %s", found["stream"])
        return JSONResponse(found)

    @route("snapshot", 409, 507)
    async def snapshot(stream: StreamId = None) -> Response:
        """Save the state now."""

        def change(tenant: Tenant) -> dict[str, Any]:
            if tenant.snapshots is None:
                raise Refusal(409, "the service keeps no state on disk; start it with --state")
            tenant.unsaved += 1  # also if nothing was learnt since the last one
            return done(tenant, _save(service, tenant))

        return JSONResponse(await service.with_tenant(tenant_name(stream), change))

    @route("rollback", 409, 507)
    async def rollback(
        stream: StreamId = None,
        to: Annotated[
            int | None,
            Query(ge=1, description="the snapshot's number; the latest good one by default"),
        ] = None,
    ) -> Response:
        """Return to a snapshot on disk."""

        def change(tenant: Tenant) -> dict[str, Any]:
            restored = tenant.snapshots and tenant.snapshots.restore(tenant.answering.load, to)
            if not restored:
                which = "no good snapshot" if to is None else f"no good snapshot {to}"
                raise Refusal(409, f"there is {which} of this stream to roll back to")
            tenant.clear_pool()
            if tenant.snapshots is not None and restored.number != tenant.snapshots.numbers[0]:
                tenant.unsaved += 1
                _save(service, tenant)  # a restart should continue from here
            else:
                tenant.unsaved = 0
            return done(tenant, restored.number)

        found = await service.with_tenant(tenant_name(stream), change)
        log.warning("admin: rolled stream %s back to %s", found["stream"], found["snapshot"])
        return JSONResponse(found)


def _save(service: Service, tenant: Tenant) -> int | None:
    try:
        saved = service.tenants.save(tenant)
    except OSError as error:
        raise Refusal(507, f"the state could not be saved: {error.strerror or error}") from None
    return None if saved is None else saved.number
