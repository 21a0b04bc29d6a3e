# SPDX-License-Identifier: Apache-2.0
"""Our exceptions as HTTP answers: one failure, two body shapes.

`/v1/*` answers with the flat object that OpenAI clients read, everything else with an object
under `error`. A request can only ever be refused with 400, never 422.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from tetrarch.core.errors import EngineDead, RequestError, TetrarchError

__all__ = [
    "Failure",
    "HttpError",
    "busy_headers",
    "error_object",
    "failure_of",
    "failure_response",
]

RETRY_AFTER_S = 5
"""What a client is told to wait while the engine cannot generate: loading, lent out or gone."""

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    503: "ServiceUnavailableError",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, ready to be sent.

    Attributes:
        message: One line; for our own errors what, why and fix.
        kind: The `type` of the error object; empty: by status.
        param: The offending field of the request, or `None`.
        headers: Sent with the response.
    """

    status: int
    message: str
    kind: str = ""
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])


class HttpError(TetrarchError):
    """A refusal that is not about the request's content: no such route, no key, not ready."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, why=f"HTTP status {failure.status}", fix="")
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return (HttpError, (self.failure,))


def failure_of(error: TetrarchError) -> Failure:
    """Turn one of our errors into what a client is told."""
    if isinstance(error, HttpError):
        return error.failure
    message = "; ".join(part for part in (error.what, error.why, error.fix) if part)
    if isinstance(error, RequestError):
        return Failure(status=400, message=message, kind="Bad Request", param=error.param)
    if isinstance(error, EngineDead):
        return Failure(status=503, message=message, headers=busy_headers(503))
    return Failure(status=500, message=message)


def busy_headers(status: int) -> dict[str, str]:
    """Return the headers of a failure: a 503 says when to come again."""
    return {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}


def error_object(failure: Failure, *, flat: bool) -> dict[str, Any]:
    """Return the inner error object.

    Args:
        failure: What to say.
        flat: The OpenAI shape, which carries `object` beside the others.
    """
    kind = failure.kind or _KINDS.get(failure.status, "InternalServerError")
    inner: dict[str, Any] = {
        "message": failure.message,
        "type": kind,
        "param": failure.param,
        "code": failure.status,
    }
    return {"object": "error", **inner} if flat else inner


def failure_response(failure: Failure, *, path: str) -> Response:
    """Return the response, in the shape that clients of `path` read."""
    flat = path.startswith("/v1/")
    body = error_object(failure, flat=flat)
    return Response(
        msgspec.json.encode(body if flat else {"error": body}),
        status_code=failure.status,
        media_type="application/json",
        headers=failure.headers,
    )
