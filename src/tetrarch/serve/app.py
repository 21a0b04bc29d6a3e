# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: routes, keys, and one answer for every kind of failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.serve.auth import Auth, Keys
from tetrarch.serve.door import Door
from tetrarch.serve.errors import Failure, HttpError, failure_of, failure_response
from tetrarch.serve.limit import BodyLimit
from tetrarch.serve.record import recorded
from tetrarch.serve.routes import ROUTES, Access

__all__ = ["build_app"]

_log = get_logger(__name__)


def build_app(door: Door) -> Starlette:
    """Return the application of one server."""
    app = Starlette(
        middleware=[
            Middleware(_OneSlash),
            Middleware(Auth, keys=_keys(door)),
            Middleware(BodyLimit, max_bytes=door.plan.serve.max_body_bytes, own=_own_bounds()),
        ],
        exception_handlers={
            TetrarchError: _on_our_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    for route in ROUTES:
        handler = route.handler
        if route.access is Access.CONTROL:
            handler = recorded(route.paths[0], handler)
        for path in route.paths:
            app.add_route(path, partial(_call, handler, door), list(route.methods))
    return app


async def _call(
    handler: Callable[[Door, Request], Awaitable[Response]], door: Door, request: Request
) -> Response:
    return await handler(door, request)


def _own_bounds() -> dict[str, int]:
    return {
        path: route.max_body_bytes
        for route in ROUTES
        for path in route.paths
        if route.max_body_bytes is not None
    }


def _keys(door: Door) -> Keys:
    def paths(access: Access) -> frozenset[str]:
        return frozenset(path for route in ROUTES if route.access is access for path in route.paths)

    return Keys(
        api_key=door.plan.serve.api_key,
        admin_api_key=door.plan.serve.admin_api_key,
        open_paths=paths(Access.OPEN),
        control_paths=paths(Access.CONTROL),
    )


class _OneSlash:
    """`/health/` is `/health`: some clients end every path with a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


async def _on_our_error(request: Request, error: Exception) -> Response:
    failure = failure_of(cast("TetrarchError", error))
    if failure.status == 500 and not isinstance(error, HttpError):  # that one is no surprise
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return failure_response(failure, path=request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    refusal = cast("HTTPException", error)
    path = request.url.path
    what = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    failure = Failure(
        status=refusal.status_code,
        message=what.get(refusal.status_code, refusal.detail),
        headers=dict(refusal.headers or {}),
    )
    return failure_response(failure, path=path)


async def _on_disconnect(*_: object) -> Response:
    return Response(status_code=499)  # goes nowhere


async def _on_bug(request: Request, error: Exception) -> Response:
    message = f"{type(error).__name__} in the server; its log has the details"
    return failure_response(Failure(status=500, message=message), path=request.url.path)
