"""The replicas and the keeper as the front asks them: one, those of a stream, or all."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from starlette.requests import Request

from moetta.serve import ray_views
from moetta.serve.ray_replica import Call, Policy, Reply
from moetta.serve.refusal import ClientLeft, Refusal

log = logging.getLogger("moetta.serve")
FAN_OUT = 10.0
"""Seconds in which all replicas must answer what is asked of all."""


class Fleet:
    """Who answers, and what becomes of those who do not.

    Args:
        policy: what replicas share.

    Attributes:
        handles: Ray Serve's; one per stream's share, else one for all. Empty until replicas run.
        keeper: the actor that keeps what replicas share.
        answering: replicas that answered when all were last asked.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.handles: list[Any] = []
        self.keeper: Any = None
        self.answering = 0

    def shard(self, stream: str) -> int:
        """The number of the handle that a stream's requests go through."""
        return ray_views.shard(stream, len(self.handles))

    async def one(self, call: Call, stream: str, request: Request, limit: float) -> Reply:
        """Ask one replica, until it answers, the client leaves or time is up."""
        response = self.handles[self.shard(stream)].http.remote(call)
        answer = asyncio.ensure_future(_wait(response))
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait((answer, left), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                reply: Reply = answer.result()
                return reply
            response.cancel()  # takes the request's images out of the replica's queue
            if left.done():
                raise ClientLeft
            raise Refusal(503, f"no replica answered within {limit:g} s; try again", retry_after=2)
        except (Refusal, ClientLeft):
            raise
        except Exception as error:
            raise refusal_for(error) from None
        finally:
            left.cancel()
            if not answer.done():
                answer.cancel()
                with suppress(BaseException):
                    await answer

    async def all(self, method: str, *args: Any, timeout: float = FAN_OUT) -> list[Any]:
        """Call a method of every replica; errors stand in place of answers.

        Raises:
            Refusal: 503; not all answered in time, or there are none.
        """
        several = [handle.broadcast(method, *args) for handle in self.handles]
        try:
            found = await asyncio.gather(
                *(b.results_async(timeout_s=timeout, return_exceptions=True) for b in several)
            )
        except Exception as error:
            raise refusal_for(error) from None
        return [reply for replies in found for reply in replies]

    async def replies(self, method: str, *args: Any) -> list[Reply]:
        """The answers of all replicas that gave one.

        Raises:
            Refusal: 503; none did.
        """
        found = await self.all(method, *args)
        replies = [reply for reply in found if isinstance(reply, Reply)]
        self.answering = len(replies)
        if not replies:
            raise Refusal(503, "no replica answers; try again", retry_after=2)
        return replies

    async def owners(self, method: str, stream: str, everyone: bool, *args: Any) -> list[Reply]:
        """Ask every replica that answers for a stream."""
        if self.policy == "by-stream" and not everyone:
            handle = self.handles[self.shard(stream)]
            try:
                reply = await asyncio.wait_for(
                    _wait(getattr(handle, method).remote(*args)), FAN_OUT
                )
            except Exception as error:
                raise refusal_for(error) from None
            return [reply]
        return await self.replies(method, *args)

    async def ask_keeper(self, method: str, *args: Any, timeout: float = 2 * FAN_OUT) -> Any:
        """The keeper's answer.

        Raises:
            Refusal: there is none, or the keeper could not save.
        """
        try:
            return await asyncio.wait_for(
                _wait(getattr(self.keeper, method).remote(*args)), timeout
            )
        except Exception as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
                reason = f"the state could not be saved: {cause.strerror or cause}"
                raise Refusal(507, reason) from None
            raise refusal_for(error) from None

    async def finish(self) -> bool:
        """Merge, save and stop; whether everything could be saved."""
        saved = True
        if self.policy == "merged":
            try:
                saved = await self.ask_keeper("finish", timeout=60)
            except Refusal as refusal:
                log.error("the merged state could not be saved: %s", refusal.reason)
                saved = False
        try:
            replies = await self.all("stop", timeout=60)
        except Refusal as refusal:
            log.error("replicas did not stop in order: %s", refusal.reason)
            return saved and self.policy == "merged"
        return saved and all(reply is True for reply in replies)


def refusal_for(error: BaseException) -> Refusal:
    """What a client is told about an error of Ray's: nearly all of them pass."""
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    if isinstance(error, Refusal):
        return error
    cause = getattr(error, "cause", None)
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, BackPressureError):
        return Refusal(503, "too many requests wait for a replica; try again", retry_after=1)
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        log.warning("a replica is gone: %s", str(error).strip().splitlines()[0])
        return Refusal(503, "the replica that had this request is gone; try again", retry_after=1)
    if isinstance(error, TimeoutError):
        return Refusal(503, "not every replica answered in time; try again", retry_after=2)
    if isinstance(error, RayTaskError):
        log.error("a replica failed: %s", error)
        return Refusal(500, "the replica failed on this request; the log says why")
    log.error("the cluster failed: %r", error)
    return Refusal(503, "the cluster does not answer; try again", retry_after=5)


async def _wait(reference: Any) -> Any:
    return await reference


async def _left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
