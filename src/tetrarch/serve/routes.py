# SPDX-License-Identifier: Apache-2.0
"""Every endpoint, one row each. The application and docs/reference/http.md are read off it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.serve.chat import chat_completions
from tetrarch.serve.completions import completions
from tetrarch.serve.control import AbortBody, abort_request, flush_cache
from tetrarch.serve.door import Door
from tetrarch.serve.info import get_weight_version, model_card, model_info, models, server_info
from tetrarch.serve.native import GenerateBody, generate_native
from tetrarch.serve.openai_types import ChatBody, CompletionBody
from tetrarch.serve.probes import health, health_generate, loads, metrics
from tetrarch.serve.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize

__all__ = ["ROUTES", "Access", "Route"]

Handler = Callable[[Door, Request], Awaitable[Response]]


class Access(StrEnum):
    """Who may call an endpoint."""

    OPEN = "open"  # everybody: probes carry no keys
    KEY = "key"  # whoever has the API key
    CONTROL = "control"  # with an admin key, only who has that


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One endpoint.

    Attributes:
        paths: The first is its name, the others are what older clients call it.
        body: Type of the JSON body, where it reads one.
    """

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    handler: Handler
    body: type[msgspec.Struct] | None = None
    access: Access = Access.KEY


def _get(handler: Handler, *paths: str, access: Access = Access.KEY) -> Route:
    return Route(methods=("GET",), paths=paths, handler=handler, access=access)


def _post(handler: Handler, path: str, body: type[msgspec.Struct]) -> Route:
    return Route(methods=("POST",), paths=(path,), handler=handler, body=body)


ROUTES: tuple[Route, ...] = (
    _get(health, "/health", "/ready", "/ping", access=Access.OPEN),
    _get(health_generate, "/health_generate", access=Access.OPEN),
    _get(metrics, "/metrics", access=Access.OPEN),
    _get(models, "/v1/models"),
    _get(model_card, "/v1/models/{name:path}"),
    _post(completions, "/v1/completions", CompletionBody),
    _post(chat_completions, "/v1/chat/completions", ChatBody),
    _get(loads, "/v1/loads"),
    Route(
        methods=("POST", "PUT"),
        paths=("/generate",),
        handler=generate_native,
        body=GenerateBody,
    ),
    _post(tokenize, "/tokenize", TokenizeBody),
    _post(detokenize, "/detokenize", DetokenizeBody),
    _get(model_info, "/model_info", "/get_model_info"),
    _get(server_info, "/server_info", "/get_server_info"),
    _get(get_weight_version, "/get_weight_version"),
    Route(
        methods=("GET", "POST"),
        paths=("/flush_cache",),
        handler=flush_cache,
        access=Access.CONTROL,
    ),
    Route(
        methods=("POST",),
        paths=("/abort_request",),
        handler=abort_request,
        body=AbortBody,
        access=Access.CONTROL,
    ),
)
