"""The one way in which the service says no: a status, a reason, and when to try again."""

from __future__ import annotations


class Refusal(Exception):
    """A request or an image that gets no prediction.

    Attributes:
        status: the HTTP status.
        reason: what is wrong, what was expected, what to do.
        retry_after: seconds after which to try again, where trying again can help.
    """

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with the status."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class ClientLeft(Exception):
    """The client closed its connection; nobody waits for an answer."""
