# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back, for clients that count tokens."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.serve.body import json_response, read_body
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Meta, read_prompts

__all__ = ["DetokenizeBody", "TokenizeBody", "detokenize", "tokenize"]


class TokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /tokenize`."""

    prompt: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    add_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None


class DetokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /detokenize`."""

    tokens: Annotated[list[Any], Meta(description="Token ids, or a list of such lists.")]
    skip_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None


async def tokenize(door: Door, http: Request) -> Response:
    """Return the ids of a text, and how many there are."""
    body = await read_body(http, TokenizeBody)
    add = body.add_special_tokens is not False
    if isinstance(body.prompt, str):
        tokens: Any = door.tokenizer.encode(body.prompt, add_special_tokens=add)
        count: Any = len(tokens)
    else:
        tokens = [door.tokenizer.encode(each, add_special_tokens=add) for each in body.prompt]
        count = [len(each) for each in tokens]
    return json_response(
        {"tokens": tokens, "count": count, "max_model_len": door.plan.model.context_len}
    )


async def detokenize(door: Door, http: Request) -> Response:
    """Return the text of ids."""
    body = await read_body(http, DetokenizeBody)
    lists, is_batch = read_prompts(body.tokens, "tokens")
    if not door.tokenizer.has_text:
        door.tokenizer.encode("")  # says why there can be no text
    texts = [
        door.tokenizer.decode(
            _known(door, each), skip_special_tokens=body.skip_special_tokens is not False
        )
        for each in lists
    ]
    return json_response({"text": texts if is_batch else texts[0]})


def _known(door: Door, ids: str | list[int]) -> list[int]:
    size = door.plan.model.facts.vocab_size
    if isinstance(ids, str) or not all(0 <= token_id < size for token_id in ids):
        raise RequestError(
            f"tokens must be ids from 0 to {size - 1}",
            why="the vocabulary holds no others",
            fix="send the ids of this model's tokenizer",
            param="tokens",
        )
    return ids
