# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import FinishReason
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.body import read_body
from tetrarch.serve.door import Door, new_rid
from tetrarch.serve.fields import OPENAI_LATER
from tetrarch.serve.meta import meta_info
from tetrarch.serve.openai import WHOLE, Job, Logprobs, answer, check_prompt, fan_out_prompts
from tetrarch.serve.openai_types import (
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    FinishName,
)
from tetrarch.serve.outputs import Output

__all__ = ["chat_completions"]


async def chat_completions(door: Door, http: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(http, ChatBody, later=OPENAI_LATER)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}, and logprobs is not true",
            why="alternatives are reported beside logprobs only",
            fix="send logprobs: true as well, or leave top_logprobs out",
            param="top_logprobs",
        )
    ids = _prompt_ids(door.tokenizer, body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    interval = {} if body.stream else {"stream_interval": WHOLE}
    sampling = body.sampling(
        max_tokens=limit,
        defaults={**door.chat_defaults, **interval},
        vocab_size=door.plan.model.facts.vocab_size,
    )
    rid = body.rid or new_rid("chatcmpl-")
    logprobs = Logprobs(wanted=bool(body.logprobs), top=body.top_logprobs or 0)
    prompt_name = {"input_ids": "messages"} if body.input_ids is None else {}
    job = Job(
        kind="chat.completion.chunk" if body.stream else "chat.completion",
        body=body,
        rid=rid,
        requests=fan_out_prompts(rid, [ids], sampling, logprobs=logprobs),
        names={**prompt_name, "top_logprobs_num": "top_logprobs"},
        num_choices=sampling.n,
    )
    return await answer(door, http, job, _ChatWriter(door, body))


def _prompt_ids(tokenizer: Tokenizer, body: ChatBody) -> Sequence[int]:
    if body.input_ids is not None:
        return check_prompt(body.input_ids, "input_ids")
    effort = body.reasoning_effort
    template_args = dict(body.chat_template_kwargs or {})
    if effort is not None:
        template_args.setdefault("reasoning_effort", effort)
    ids = tokenizer.encode_chat(
        body.messages,
        continue_final_message=bool(body.continue_final_message),
        template_args=template_args,
    )
    return check_prompt(ids, "messages")


class _ChatWriter:
    """Writes choices. In a stream: the role, then content, then the finish reason."""

    def __init__(self, door: Door, body: ChatBody) -> None:
        self._door, self._body = door, body

    def whole(self, output: Output) -> ChatChoice:
        piece = output.piece()
        reason, matched = _ending(output.finish)
        return ChatChoice(
            index=output.index,
            message=ChatMessage(role="assistant", content=piece.text),
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=reason,
            matched_stop=matched,
            token_ids=piece.token_ids if self._body.return_token_ids else None,
            meta_info=self._meta_info(output),
            error=output.error,
        )

    def pieces(self, output: Output) -> Sequence[ChatChunkChoice]:
        piece = output.piece()
        with_ids = piece.token_ids if self._body.return_token_ids else None
        chunks: list[ChatChunkChoice] = []
        # The role goes out with the first token: sent earlier, it would pass for one.
        if piece.is_first:
            chunks.append(_chunk(output, ChatMessage(role="assistant", content="")))
        # A token that shows no text yet is still a step that clients time.
        if piece.text or output.finish is None or piece.logprobs or with_ids:
            chunks.append(
                ChatChunkChoice(
                    index=output.index,
                    delta=ChatMessage(content=piece.text),
                    logprobs=self._logprobs(piece.logprobs),
                    finish_reason=None,
                    matched_stop=None,
                    token_ids=with_ids,
                )
            )
        if output.finish is not None:
            reason, matched = _ending(output.finish)
            chunks.append(
                ChatChunkChoice(
                    index=output.index,
                    delta=ChatMessage(),
                    logprobs=None,
                    finish_reason=reason,
                    matched_stop=matched,
                    meta_info=self._meta_info(output),
                    error=output.error,
                )
            )
        return chunks

    def _meta_info(self, output: Output) -> dict[str, Any] | None:
        return meta_info(self._door, output) if self._body.return_meta_info else None

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs([self._token(entry) for entry in entries])

    def _token(self, entry: TokenLogprob) -> ChatToken:
        top = [self._alternative(token_id, logprob) for token_id, logprob in entry.top]
        return self._alternative(entry.token_id, entry.logprob, top)

    def _alternative(
        self, token_id: int, logprob: float, top: list[ChatToken] | None = None
    ) -> ChatToken:
        tokenizer = self._door.tokenizer
        return ChatToken(
            token=tokenizer.token_text(token_id),
            bytes=list(tokenizer.token_bytes(token_id)),
            logprob=logprob,
            top_logprobs=top,
        )


def _chunk(output: Output, delta: ChatMessage) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=output.index, delta=delta, logprobs=None, finish_reason=None, matched_stop=None
    )


def _ending(finish: FinishReason | None) -> tuple[FinishName | None, int | str | None]:
    return (None, None) if finish is None else (finish.kind, finish.matched)
