# SPDX-License-Identifier: Apache-2.0
"""Request fields that several endpoints share, and what a client may leave out or send as null.

A field of a feature that later work brings is declared here and refused when it asks for
something: silently ignoring it would change the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.engine.sampling import parse_sampling

__all__ = [
    "COMPLETIONS_LATER",
    "NATIVE_LATER",
    "OPENAI_LATER",
    "Ignored",
    "Meta",
    "SamplingFields",
    "StreamOptions",
    "check_num_outputs",
    "read_ids",
    "read_prompts",
    "refuse_later",
    "renamed",
]

Meta = msgspec.Meta
Ignored = Annotated[Any, Meta(description="Accepted and ignored: it has nothing to do here.")]

MAX_OUTPUTS = 1 << 14
"""Of one HTTP request; more would keep the server from answering others for seconds."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """Sampling parameters under their OpenAI names; null means the default."""

    temperature: Annotated[float | None, Meta(description="Below 1e-6 is greedy.")] = None
    top_p: Annotated[float | None, Meta(description="In (0, 1].")] = None
    top_k: Annotated[int | None, Meta(description="At least 1, or -1 for all.")] = None
    min_p: Annotated[float | None, Meta(description="In [0, 1].")] = None
    n: Annotated[int | None, Meta(description="Independent outputs for each prompt.")] = None
    seed: Annotated[int | None, Meta(description="Same seed and request: same output.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="Strings that end the text.")] = None
    stop_regex: Annotated[
        str | list[str] | None,
        Meta(description="Regular expressions that end it; a match is at most 256 characters."),
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Ids that end it.")] = None
    min_tokens: Annotated[int | None, Meta(description="Nothing ends the text before.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="The end token ends nothing.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="In [-2, 2].")] = None
    presence_penalty: Annotated[float | None, Meta(description="In [-2, 2].")] = None
    repetition_penalty: Annotated[float | None, Meta(description="In (0, 2].")] = None
    logit_bias: Annotated[dict[str, float] | None, Meta(description="By token id.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None
    no_stop_trim: Annotated[bool | None, Meta(description="Keep the stop string.")] = None

    def sampling(
        self, *, max_tokens: int | None, defaults: Mapping[str, Any], vocab_size: int
    ) -> SamplingParams:
        """Check them, and return them as the engine takes them.

        Args:
            max_tokens: Most new tokens; `None`: up to the context length.
            defaults: For fields that are absent, under the engine's names.
            vocab_size: Of the model.

        Raises:
            RequestError: A value is out of bounds; `param` is the name that the client used.
        """
        sent = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        raw = {_ENGINE_NAME.get(name, name): value for name, value in sent.items()}
        raw = {name: value for name, value in raw.items() if value is not None}
        try:
            return parse_sampling(
                {**defaults, **raw, "max_new_tokens": max_tokens}, vocab_size=vocab_size
            )
        except RequestError as error:
            raise renamed(error, _CLIENT_NAME) from error


_ENGINE_NAME = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_CLIENT_NAME = {
    "max_new_tokens": "max_tokens",
    **{theirs: ours for ours, theirs in _ENGINE_NAME.items()},
}


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Speak of `max_tokens` to a client that sent `max_tokens`; `names` maps ours to theirs."""
    words = [error.what, error.why, error.fix]
    for ours, theirs in names.items():
        words = [text.replace(ours, theirs) for text in words]
    what, why, fix = words
    param = None if error.param is None else names.get(error.param, error.param)
    return RequestError(what, why=why, fix=fix, param=param)


OPENAI_LATER = frozenset(
    {
        "suffix",
        "response_format",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "guided_choice",
        "structured_outputs",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "modalities",
        "web_search_options",
        "custom_logit_processor",
        "use_beam_search",
        "lora_path",
        "return_hidden_states",
        "return_routed_experts",
    }
)
"""Fields of `/v1/*` that ask for something we do not do."""

COMPLETIONS_LATER = OPENAI_LATER | {"input_ids"}
"""The same where the prompt is called `prompt`."""

NATIVE_LATER = frozenset(
    {
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "lora_path",
        "session_params",
        "custom_logit_processor",
        "bootstrap_host",
        "bootstrap_room",
        "return_hidden_states",
        "return_routed_experts",
        "return_indexer_topk",
    }
)
"""The same for `/generate`."""


def refuse_later(body: Mapping[str, Any], later: frozenset[str]) -> None:
    """Refuse a request that asks for what is not there yet; neutral values are accepted.

    Raises:
        RequestError: Names the field.
    """
    for name in later.intersection(body):
        if not _is_neutral(name, body[name]):
            raise RequestError(
                f"{name} is not supported yet",
                why="ignoring it would give another output than was asked for",
                fix=f"leave {name} out, or send null",
                param=name,
            )


def _is_neutral(name: str, value: Any) -> bool:
    if not value:
        return True  # null, false, "", {} and []
    if name == "modalities":
        return value == ["text"]
    if isinstance(value, list):  # one a prompt
        return all(item is None or item is False for item in cast("list[Any]", value))
    if name == "response_format":
        return isinstance(value, dict) and cast("dict[str, Any]", value).get("type") == "text"
    return name in ("tool_choice", "function_call") and value in ("none", "auto")


def read_prompts(value: Any, key: str) -> tuple[list[str] | list[list[int]], bool]:
    """Read a prompt that may be text, ids, or a list of either.

    Returns:
        prompts: All text, or all ids.
        is_batch: The client sent a list of prompts, even if of one.

    Raises:
        RequestError: None of these forms, or empty.
    """
    if isinstance(value, str):
        return [value], False
    items = _list(value)
    if items and all(isinstance(item, str) for item in items):
        return items, True
    if (found := _id_prompts(items)) is not None:
        return found
    raise RequestError(
        f"{key} is not a prompt",
        why="a prompt is a string or a list of token ids; a batch is a list of one or the other",
        fix=f"send {key} as one of these, not empty",
        param=key,
    )


def read_ids(value: Any, key: str) -> tuple[list[list[int]], bool]:
    """Read a prompt, or a batch of them, where only token ids will do.

    Returns:
        prompts: The ids of each.
        is_batch: As in `read_prompts`.

    Raises:
        RequestError: Anything else, text included; or empty.
    """
    if (found := _id_prompts(_list(value))) is not None:
        return found
    raise RequestError(
        f"{key} is not a list of token ids",
        why="ids are integers, and a batch is a list of such lists; text is no id",
        fix=f"send integers in {key}, not empty",
        param=key,
    )


def check_num_outputs(count: int) -> None:
    """Bound the outputs of one HTTP request, before a request is made for each.

    Raises:
        RequestError: There are too many.
    """
    if count > MAX_OUTPUTS:
        raise RequestError(
            f"{count} outputs are too many for one request",
            why=f"prompts times n may be {MAX_OUTPUTS} at most",
            fix="send several requests",
            param="n",
        )


def _id_prompts(items: list[Any]) -> tuple[list[list[int]], bool] | None:
    if _is_ids(items):
        return [items], False
    if items and all(_is_ids(item) for item in items):
        return items, True
    return None


def _is_ids(value: Any) -> bool:
    ids = _list(value)
    return bool(ids) and all(type(item) is int for item in ids)


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
