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
from tetrarch.serve.control import (
    AbortBody,
    ContinueBody,
    PauseBody,
    abort_request,
    continue_generation,
    flush_cache,
    pause_generation,
)
from tetrarch.serve.door import Door
from tetrarch.serve.groups import (
    DestroyGroupBody,
    DistributedBody,
    InitGroupBody,
    destroy_weights_update_group,
    init_weights_update_group,
    update_weights_from_distributed,
)
from tetrarch.serve.info import get_weight_version, model_card, model_info, models, server_info
from tetrarch.serve.inspection import (
    CheckBody,
    VersionBody,
    WeightBody,
    get_weights_by_name,
    update_weight_version,
    weights_checker,
)
from tetrarch.serve.memory import (
    ReleaseBody,
    ResumeBody,
    release_memory_occupation,
    resume_memory_occupation,
)
from tetrarch.serve.native import GenerateBody, generate_native
from tetrarch.serve.openai_types import ChatBody, CompletionBody
from tetrarch.serve.probes import health, health_generate, loads, metrics, ready
from tetrarch.serve.ranks import MOST_BODY_BYTES
from tetrarch.serve.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tetrarch.serve.weights import (
    BeginBody,
    DiskBody,
    PostProcessBody,
    TensorBody,
    begin_weight_update,
    end_weight_update,
    post_process_weights,
    update_weights_from_disk,
    update_weights_from_tensor,
)

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
        max_body_bytes: Largest body that it reads, where that is more than --max-body-bytes.
    """

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    handler: Handler
    body: type[msgspec.Struct] | None = None
    access: Access = Access.KEY
    max_body_bytes: int | None = None


def _get(handler: Handler, *paths: str, access: Access = Access.KEY) -> Route:
    return Route(methods=("GET",), paths=paths, handler=handler, access=access)


def _post(handler: Handler, path: str, body: type[msgspec.Struct]) -> Route:
    return Route(methods=("POST",), paths=(path,), handler=handler, body=body)


_BOTH = ("GET", "POST")


def _control(
    handler: Handler,
    path: str,
    body: type[msgspec.Struct] | None = None,
    *,
    methods: tuple[str, ...] = ("POST",),
    max_body_bytes: int | None = None,
) -> Route:
    return Route(
        methods=methods,
        paths=(path,),
        handler=handler,
        body=body,
        access=Access.CONTROL,
        max_body_bytes=max_body_bytes,
    )


ROUTES: tuple[Route, ...] = (
    _get(health, "/health", "/ping", access=Access.OPEN),
    _get(ready, "/ready", access=Access.OPEN),
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
    _control(flush_cache, "/flush_cache", methods=_BOTH),
    _control(abort_request, "/abort_request", AbortBody),
    _control(pause_generation, "/pause_generation", PauseBody),
    _control(continue_generation, "/continue_generation", ContinueBody),
    _control(update_weights_from_disk, "/update_weights_from_disk", DiskBody),
    _control(
        update_weights_from_tensor,
        "/update_weights_from_tensor",
        TensorBody,
        max_body_bytes=MOST_BODY_BYTES,
    ),
    _control(update_weights_from_distributed, "/update_weights_from_distributed", DistributedBody),
    _control(init_weights_update_group, "/init_weights_update_group", InitGroupBody),
    _control(destroy_weights_update_group, "/destroy_weights_update_group", DestroyGroupBody),
    _control(begin_weight_update, "/begin_weight_update", BeginBody),
    _control(end_weight_update, "/end_weight_update"),
    _control(post_process_weights, "/post_process_weights", PostProcessBody),
    _control(update_weight_version, "/update_weight_version", VersionBody),
    _control(get_weights_by_name, "/get_weights_by_name", WeightBody, methods=_BOTH),
    _control(weights_checker, "/weights_checker", CheckBody, methods=_BOTH),
    _control(release_memory_occupation, "/release_memory_occupation", ReleaseBody, methods=_BOTH),
    _control(resume_memory_occupation, "/resume_memory_occupation", ResumeBody, methods=_BOTH),
)
