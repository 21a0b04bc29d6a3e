# SPDX-License-Identifier: Apache-2.0
"""What goes in and out of `/v1/*`, field for field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from tetrarch.serve.fields import Meta, SamplingFields, StreamOptions
from tetrarch.serve.outputs import Output

__all__ = [
    "ChatBody",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatLogprobs",
    "ChatMessage",
    "ChatToken",
    "Choice",
    "CompletionBody",
    "CompletionChoice",
    "CompletionDetails",
    "CompletionLogprobs",
    "FinishName",
    "ObjectName",
    "OpenAIBody",
    "Reply",
    "Usage",
    "usage_of",
]

MAX_TOP_LOGPROBS = 20

ObjectName = Literal["text_completion", "chat.completion", "chat.completion.chunk"]
FinishName = Literal["stop", "length", "abort"]
_TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class OpenAIBody(SamplingFields, kw_only=True, frozen=True):
    """Fields of both endpoints besides sampling."""

    model: Annotated[str | None, Meta(description="Echoed; one server serves one model.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[
        StreamOptions | None, Meta(description="include_usage, continuous_usage_stats.")
    ] = None
    rid: Annotated[str | None, Meta(description="Request id, which /abort_request takes.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Add ids to each choice.")] = None


class CompletionBody(OpenAIBody, kw_only=True, frozen=True):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, Meta(description="Text or token ids, or a list of either.")]
    max_tokens: Annotated[int | None, Meta(description="Default 16; 0 scores the prompt.")] = None
    echo: Annotated[bool | None, Meta(description="Begin with the prompt.")] = None
    logprobs: Annotated[
        _TopCount | None, Meta(description="Report logprobs, and so many alternatives.")
    ] = None
    best_of: Annotated[int | None, Meta(description="Only as n.")] = None


class ChatBody(OpenAIBody, kw_only=True, frozen=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[
        list[dict[str, Any]], Meta(description="role and content, text or a list of text parts.")
    ] = []
    input_ids: Annotated[
        list[int] | None, Meta(description="The prompt's token ids, instead of messages.")
    ] = None
    max_completion_tokens: Annotated[
        int | None, Meta(description="Default: up to the context length.")
    ] = None
    max_tokens: Annotated[int | None, Meta(description="Older name of the same.")] = None
    logprobs: Annotated[bool | None, Meta(description="Report logprobs.")] = None
    top_logprobs: Annotated[_TopCount | None, Meta(description="And alternatives.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further variables of the chat template.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message instead of answering it.")
    ] = None
    reasoning_effort: Annotated[str | None, Meta(description="Given to the chat template.")] = None
    return_meta_info: Annotated[
        bool | None, Meta(description="Add /generate's meta_info to each choice.")
    ] = None


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `Usage`."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Part of `Usage`: drafts that became part of the outputs, and drafts that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. A prompt counts once, however many outputs it has.

    Attributes:
        completion_tokens_details: Absent where no draft was verified.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    reasoning_tokens: int = 0
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token; a prompt's first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole choice, or the next piece of one; `error` where it failed and others did not."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | None = None


class ChatToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token and its logprob; `bytes` also where it is part of a character."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[ChatToken] | None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of the content's tokens."""

    content: list[ChatToken]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message, or in a stream what is new about it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole choice; `error` where it failed and others did not."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    meta_info: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next piece of a choice."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    meta_info: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


Choice = CompletionChoice | ChatChoice | ChatChunkChoice


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A response, or a chunk of one; `object` says which."""

    id: str
    object: ObjectName
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | None
    metadata: dict[str, str]


def usage_of(outputs: list[Output], *, num_choices: int) -> Usage:
    """Count tokens.

    Args:
        outputs: Prompt-major, `num_choices` for each prompt.
        num_choices: Outputs of one prompt.
    """
    firsts = outputs[::num_choices]
    prompt = sum(len(output.request.prompt_ids) for output in firsts)
    completion = sum(len(output.token_ids) for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(sum(output.num_cached for output in firsts)),
        completion_tokens_details=_details(outputs),
    )


def _details(outputs: list[Output]) -> CompletionDetails | msgspec.UnsetType:
    found = [output.acceptance for output in outputs if output.acceptance is not None]
    if not found:
        return msgspec.UNSET
    accepted = sum(one.num_accepted for one in found)
    return CompletionDetails(accepted, sum(one.num_proposed for one in found) - accepted)
