# SPDX-License-Identifier: Apache-2.0
"""Who may call what: one key for everything, one more for control endpoints."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from tetrarch.serve.errors import Failure, failure_response

__all__ = ["Auth", "Keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server, and the paths that differ from the rest.

    Attributes:
        api_key: Opens everything; `None`: no key is needed.
        admin_api_key: Opens the control paths, and then nothing else does.
        open_paths: Answered to everybody.
    """

    api_key: str | None = field(repr=False)
    admin_api_key: str | None = field(repr=False)
    open_paths: frozenset[str]
    control_paths: frozenset[str]


class Auth:
    """ASGI middleware that checks `Authorization: Bearer <key>`, in constant time."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it: 401 without the key, 403 with a lesser one."""
        failure = self._refusal(scope) if scope["type"] == "http" else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await failure_response(failure, path=scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        path, keys = str(scope["path"]), self._keys
        if path in keys.open_paths or scope["method"] == "OPTIONS":
            return None
        wants_admin = path in keys.control_paths and keys.admin_api_key is not None
        wanted = keys.admin_api_key if wants_admin else keys.api_key
        sent = _bearer(scope)
        if wanted is None or _same(sent, wanted):
            return None
        if wants_admin and keys.api_key is not None and _same(sent, keys.api_key):
            return Failure(status=403, message=f"{path} wants the admin key, not the API key")
        return Failure(
            status=401,
            message="the key is missing or wrong; send the header Authorization: Bearer <key>",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _same(sent: bytes, key: str) -> bool:
    return hmac.compare_digest(sent, key.encode())


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""
