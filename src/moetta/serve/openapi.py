"""The parts of the OpenAPI document that FastAPI cannot work out: bodies, answers and refusals."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header
from pydantic import BaseModel, Field

from moetta.serve.bodies import RAW_TYPES
from moetta.serve.tenant import NAME

StreamId = Annotated[
    str | None,
    Header(alias="X-Stream-Id", pattern=f"^{NAME}$", description="whose adapter state"),
]


class Label(BaseModel):
    """One class that an image may belong to."""

    label: str
    class_: int = Field(alias="class", ge=0)
    probability: float = Field(ge=0, le=1.001)


class Prediction(BaseModel):
    """What is said about one image: classes, or why there are none."""

    labels: list[Label] | None = None
    entropy: float | None = Field(None, description="in nats; with explain=1")
    entropy_share: float | None = Field(None, description="as a share of ln C; with explain=1")
    experts: dict[str, list[int]] | None = Field(
        None, description="the experts that the image was routed to, by layer; with explain=1"
    )
    error: str | None = None
    status: int | None = Field(None, description="the status that the error alone would have")


class Predictions(BaseModel):
    """The answer to a request."""

    request_id: str
    stream: str
    step: int = Field(
        ge=0,
        description="updates of the adapter before this answer, those that were skipped included",
    )
    predictions: list[Prediction]


class Problem(BaseModel):
    """A refusal."""

    error: str
    request_id: str | None = None


class Done(BaseModel):
    """The answer to an admin call."""

    stream: str
    step: int = Field(ge=0)
    paused: bool
    snapshot: int | None = Field(None, description="the number of the snapshot saved or restored")


class Alive(BaseModel):
    """The answer of the health checks."""

    status: str


REASONS = {
    401: "A key or token is missing or wrong",
    403: "Admin calls are disabled, or another origin's page called",
    404: "There is no such thing",
    405: "This path does not take this method",
    408: "The body arrived too slowly",
    409: "There is nothing to roll back to",
    413: "Too many bytes, pixels or images",
    415: "Not a content type or image format that is accepted",
    421: "This host name is not served here",
    422: "The body or a parameter cannot be read",
    429: "Too many streams, or too many images of this one wait",
    500: "The model failed",
    503: "The queue is full, the wait was too long, or the service is shutting down",
    507: "The snapshot could not be written",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of refusals."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in (*statuses, 403, 421):
        found[status] = {"model": Problem, "description": REASONS[status]}
        if status in (429, 503):
            found[status]["headers"] = {
                "Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}
            }
    return found


_BINARY = {"type": "string", "format": "binary"}
PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            **{kind: {"schema": _BINARY} for kind in RAW_TYPES},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {"image": {"type": "array", "items": _BINARY, "minItems": 1}},
                }
            },
            "application/json": {
                "schema": {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "string", "format": "byte"},
                }
            },
        },
    }
}
