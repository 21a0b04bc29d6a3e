# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.engine.stream import TextStream
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.body import read_body
from tetrarch.serve.door import Door, new_rid
from tetrarch.serve.fields import OPENAI_LATER, read_prompts
from tetrarch.serve.openai import WHOLE, Job, Logprobs, answer, check_prompt, fan_out_prompts
from tetrarch.serve.openai_types import CompletionBody, CompletionChoice, CompletionLogprobs
from tetrarch.serve.outputs import Output

__all__ = ["completions"]

DEFAULT_MAX_TOKENS = 16


async def completions(door: Door, http: Request) -> Response:
    """Continue a prompt, or a batch of prompts."""
    body = await read_body(http, CompletionBody, later=OPENAI_LATER)
    prompts, _ = read_prompts(body.prompt, "prompt")
    prompt_ids = [
        check_prompt(door.tokenizer.encode(each) if isinstance(each, str) else each, "prompt")
        for each in prompts
    ]
    sampling = body.sampling(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        defaults={} if body.stream else {"stream_interval": WHOLE},
        vocab_size=door.plan.model.facts.vocab_size,
    )
    _check_best_of(body, sampling.n)
    rid = body.rid or new_rid("cmpl-")
    scores_prompt = bool(body.echo) and body.logprobs is not None
    logprobs = Logprobs(
        wanted=body.logprobs is not None,
        start=0 if scores_prompt else -1,
        top=body.logprobs or 0,
    )
    job = Job(
        kind="text_completion",
        body=body,
        rid=rid,
        requests=fan_out_prompts(rid, prompt_ids, sampling, logprobs=logprobs),
        names={"input_ids": "prompt", "top_logprobs_num": "logprobs"},
        num_choices=sampling.n,
    )
    texts = [
        each if isinstance(each, str) else _text_of(door.tokenizer, each, sampling)
        for each in (prompts if body.echo else ())
    ]
    return await answer(door, http, job, _CompletionWriter(door.tokenizer, job, body, texts))


def _text_of(tokenizer: Tokenizer, ids: Sequence[int], sampling: SamplingParams) -> str:
    return tokenizer.decode(
        ids,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
    )


def _check_best_of(body: CompletionBody, num_choices: int) -> None:
    if body.best_of not in (None, num_choices):
        raise RequestError(
            f"best_of is {body.best_of}, and n is {num_choices}",
            why="outputs are not ranked",
            fix="send best_of equal to n, or leave it out",
            param="best_of",
        )


class _CompletionWriter:
    """Writes choices; keeps for each output where its next token stands in the text."""

    def __init__(
        self, tokenizer: Tokenizer, job: Job, body: CompletionBody, texts: Sequence[str]
    ) -> None:
        self._tokenizer, self._job, self._body = tokenizer, job, body
        self._prompt_texts = texts
        self._places: dict[int, _Places] = {}

    def whole(self, output: Output) -> CompletionChoice:
        return self._choice(output)

    def pieces(self, output: Output) -> Sequence[CompletionChoice]:
        return (self._choice(output),)

    def _choice(self, output: Output) -> CompletionChoice:
        piece = output.piece()
        echoes = piece.is_first and bool(self._body.echo)
        before = self._prompt_texts[output.index // self._job.num_choices] if echoes else ""
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(output, piece.logprobs, with_prompt=echoes)
        finish, with_ids = output.finish, self._body.return_token_ids
        first_ids = list(output.request.prompt_ids) if with_ids and piece.is_first else None
        return CompletionChoice(
            index=output.index,
            text=before + piece.text,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.kind,
            matched_stop=None if finish is None else finish.matched,
            token_ids=piece.token_ids if with_ids else None,
            prompt_token_ids=first_ids,
        )

    def _logprobs(
        self, output: Output, new: Sequence[TokenLogprob], *, with_prompt: bool
    ) -> CompletionLogprobs:
        entries: list[TokenLogprob | None] = list(new)
        ids = [entry.token_id for entry in new]
        prompt_ids = output.request.prompt_ids
        if with_prompt:
            # The first token has nothing before it, hence no logprob.
            unscored = len(prompt_ids) - len(output.prompt_logprobs)
            entries = [*[None] * unscored, *output.prompt_logprobs, *new]
            ids = [*prompt_ids, *ids]
        places = self._places.setdefault(
            output.index,
            _Places(self._tokenizer, output.request.sampling, () if with_prompt else prompt_ids),
        )
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in ids],
            token_logprobs=[entry and entry.logprob for entry in entries],
            top_logprobs=[entry and self._top(entry) for entry in entries],
            text_offset=[places.next(token_id) for token_id in ids],
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives by text; of tokens that read alike, the likeliest."""
        top = {self._tokenizer.token_text(each): value for each, value in reversed(entry.top)}
        return dict(reversed(top.items()))


class _Places:
    """The character at which each token of a growing text begins."""

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, context: Sequence[int]
    ) -> None:
        self._stream = TextStream(tokenizer, sampling, context)
        self._at = 0

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._stream.push(token_id))
        return at
