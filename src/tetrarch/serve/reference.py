# SPDX-License-Identifier: Apache-2.0
"""docs/reference/http.md, read off the routes and the types of their bodies."""

from __future__ import annotations

from inspect import getdoc
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tetrarch.engine.request import SamplingParams
from tetrarch.serve.drafting import COUNTERS, LENGTHS
from tetrarch.serve.fields import NATIVE_LATER, OPENAI_LATER, SamplingFields, StreamOptions
from tetrarch.serve.openai_types import CompletionDetails, OpenAIBody
from tetrarch.serve.routes import ROUTES, Access, Route

__all__ = ["markdown"]

_RULES = """\
- Bodies are JSON. Under `/v1/` the content type must say so. A missing body means `{}`, a null
  means the default, an unknown key at the top level is ignored.
- Bare `NaN` and `Infinity`, and integers of more than 64 bits, are refused.
- A request is refused with 400, and the message names the key and its bound. Under `/v1/` the
  body is `{"object": "error", "message", "type", "param", "code"}`, elsewhere
  `{"error": {"message", "type", "param", "code"}}`.
- A body of more than `--max-body-bytes` is refused with 413, and not read to its end. Tensors of
  /update_weights_from_tensor have a bound of their own, 4 GiB a call.
- 503 with `Retry-After` means that the engine is loading, stopping or gone; or, as the error's
  `type` says, `weights_inconsistent`, `weights_released`, `weights_not_loaded` or `kv_released`.
- Control endpoints of trainers answer `{"success", "message", ...}`, and with `error` besides when
  they refuse. What their body may say, their query string may say, too.
- A stream is `data: <one line of JSON>` and an empty line, event by event, and `data: [DONE]` at
  the end. There are no comments and no pings. A failure after the start is an event with a
  top-level `error`. The first event is awaited before the status line.
- One output of several that fails ends alone: its finish reason is `abort`, and `/generate` adds
  `message`, `status_code` and `err_type`. Where all outputs fail, the request does.
- A client that hangs up ends its request, streaming or not.
- A trailing slash does not matter.
- `--api-key` is a bearer token for everything except probes. With `--admin-api-key`, control
  endpoints take that key and no other: 401 without a key, 403 with the lesser one."""

_COUNTED = """\
With `--speculative-algorithm`, from the first verification on. What lies behind the token that
ends an output is counted nowhere.

- `/generate`: in the last `meta_info` of an output of which drafts were verified.
- `/v1/`: `usage.completion_tokens_details`, all outputs together, has drafts that were what the
  model said, and drafts that were not: `{}` and `{}`.
- `/server_info`: `internal_states[0].speculation` has `lifetime`, since the start, and
  `since_flush`, since the last `/flush_cache`. `internal_states[0].avg_spec_accept_length` is the
  `length` of the latter, and until something was verified since, of the former.
- `/metrics`: totals since the start, means since the last `/flush_cache`."""

_ACCESS = {
    Access.OPEN: "open to everybody",
    Access.KEY: "API key",
    Access.CONTROL: "admin key, or the API key where there is no admin key",
}


def markdown() -> str:
    """Return the page."""
    parts = ["# HTTP", _RULES, "## Endpoints", _summary()]
    parts += [_endpoint(route) for route in ROUTES if route.body is not None]
    parts += [
        "## Shared fields of `/v1/completions` and `/v1/chat/completions`",
        _fields(OpenAIBody, without=()),
        "Not supported yet, and refused unless the value asks for nothing: "
        f"{_names(OPENAI_LATER)}.",
        "## `sampling_params` of `/generate`",
        _sampling(),
        "## Counters of speculation",
        _COUNTED.format(*CompletionDetails.__struct_fields__),
        _counters(),
    ]
    return "\n\n".join(parts) + "\n"


def _summary() -> str:
    rows = ["| methods | path | also | what | key |", "| --- | --- | --- | --- | --- |"]
    for route in ROUTES:
        path, *also = (f"`{path}`" for path in route.paths)
        what = (getdoc(route.handler) or "").partition("\n")[0]
        cells = (", ".join(route.methods), path, ", ".join(also), what, _ACCESS[route.access])
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _counters() -> str:
    rows = [
        "| what | `/generate` | `/server_info` | `/metrics` |",
        "| --- | --- | --- | --- |",
        *(_row(one.about, one.meta, one.key, one.metric) for one in COUNTERS),
        *(_row(one.about, "", one.key, one.metric) for one in LENGTHS),
    ]
    return "\n".join(rows)


def _row(about: str, *names: str) -> str:
    return f"| {' | '.join((about, *(f'`{name}`' if name else '' for name in names)))} |"


def _endpoint(route: Route) -> str:
    assert route.body is not None
    is_openai = issubclass(route.body, OpenAIBody)
    parts = [
        f"## `{route.methods[0]} {route.paths[0]}`",
        getdoc(route.handler) or "",
        _fields(route.body, without=OpenAIBody.__struct_fields__ if is_openai else ()),
    ]
    if route.paths[0] == "/generate":
        parts.append(f"Not supported yet: {_names(NATIVE_LATER)}.")
    return "\n\n".join(parts)


def _fields(kind: type[msgspec.Struct], *, without: tuple[str, ...]) -> str:
    rows = ["| field | type | |", "| --- | --- | --- |"]
    plain, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        if name not in without:
            rows.append(f"| `{name}` | {_type(plain[name])} | {_about(annotated[name])} |")
    return "\n".join(rows)


def _type(hint: Any) -> str:
    """Return a type as text, without null, which every optional field takes."""
    is_union = get_origin(hint) in (Union, UnionType)
    members = [each for each in get_args(hint) if each is not NoneType] if is_union else [hint]
    words: list[str] = []
    for each in members:
        if get_origin(each) is Literal:
            words += [f'"{value}"' for value in get_args(each)]
        else:
            is_plain = isinstance(each, type) and not get_args(each)
            words.append(each.__name__ if is_plain else str(each))
    text = " or ".join(words).replace("typing.", "").replace("None", "null")
    text = text.replace("|", "\\|")
    return f"`{text.replace(StreamOptions.__name__, 'object').replace('Any', 'any')}`"


def _about(hint: Any) -> str:
    return next(
        (extra.description or "" for extra in get_args(hint)[1:] if type(extra) is msgspec.Meta),
        "",
    )


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _sampling() -> str:
    """Every key of the engine, with its default and what `/v1/` says about it."""
    hints = get_type_hints(SamplingFields, include_extras=True)
    theirs = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    rows = ["| key | default | |", "| --- | --- | --- |"]
    defaults = msgspec.structs.asdict(SamplingParams())
    for name, default in defaults.items():
        about = _about(hints.get(theirs.get(name, name)))
        shown = msgspec.json.encode(default).decode()
        rows.append(f"| `{name}` | `{shown}` | {about} |")
    return "\n".join(rows)
