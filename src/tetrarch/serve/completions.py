# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.engine.stream import TextStream
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.body import read_body
from tetrarch.serve.door import Door, new_rid
from tetrarch.serve.fields import COMPLETIONS_LATER, read_prompts
from tetrarch.serve.openai import WHOLE, Job, Logprobs, answer, check_prompt, fan_out_prompts
from tetrarch.serve.openai_types import CompletionBody, CompletionChoice, CompletionLogprobs
from tetrarch.serve.outputs import Output

__all__ = ["completions"]

DEFAULT_MAX_TOKENS = 16


async def completions(door: Door, http: Request) -> Response:
    """Continue a prompt, or a batch of prompts."""
    body = await read_body(http, CompletionBody, later=COMPLETIONS_LATER)
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
    return await answer(door, http, job, _CompletionWriter(door.tokenizer, job, body, prompts))


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
        self,
        tokenizer: Tokenizer,
        job: Job,
        body: CompletionBody,
        prompts: Sequence[str] | Sequence[list[int]],
    ) -> None:
        self._tokenizer, self._job, self._body = tokenizer, job, body
        self._prompts = prompts
        self._places: dict[int, _Places] = {}

    def whole(self, output: Output) -> CompletionChoice:
        return self._choice(output)

    def pieces(self, output: Output) -> Sequence[CompletionChoice]:
        return (self._choice(output),)

    def _choice(self, output: Output) -> CompletionChoice:
        piece = output.piece()
        echo = self._echo(output) if piece.is_first and self._body.echo else None
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(output, piece.logprobs, echo)
        finish, with_ids = output.finish, self._body.return_token_ids
        first_ids = list(output.request.prompt_ids) if with_ids and piece.is_first else None
        return CompletionChoice(
            index=output.index,
            text=piece.text if echo is None else echo.text + piece.text,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.kind,
            matched_stop=None if finish is None else finish.matched,
            token_ids=piece.token_ids if with_ids else None,
            prompt_token_ids=first_ids,
            error=output.error,
        )

    def _echo(self, output: Output) -> _Echo:
        prompt = self._prompts[output.index // self._job.num_choices]
        whole = self._job.requests[output.index].prompt_ids
        sent = prompt if isinstance(prompt, str) else None
        return _Echo(self._tokenizer, output.request, whole, sent)

    def _logprobs(
        self, output: Output, new: Sequence[TokenLogprob], echo: _Echo | None
    ) -> CompletionLogprobs:
        request = output.request
        ids = [entry.token_id for entry in new]
        start = 0 if echo is None else len(echo.text)
        places = self._places.setdefault(
            output.index,
            _Places(self._tokenizer, request.sampling, request.prompt_ids, start=start),
        )
        entries: list[TokenLogprob | None] = list(new)
        offsets = [places.next(token_id) for token_id in ids]
        if echo is not None:
            # The first token has nothing before it, hence no logprob.
            unscored = len(request.prompt_ids) - len(output.prompt_logprobs)
            entries = [*[None] * unscored, *output.prompt_logprobs, *new]
            ids = [*request.prompt_ids, *ids]
            offsets = [*echo.offsets(), *offsets]
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in ids],
            token_logprobs=[entry and entry.logprob for entry in entries],
            top_logprobs=[entry and self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives by text; of tokens that read alike, the likeliest."""
        top = {self._tokenizer.token_text(each): value for each, value in reversed(entry.top)}
        return dict(reversed(top.items()))


class _Echo:
    """A prompt as its client reads it again: text as it was sent, ids decoded.

    Of a prompt that was cut to fit, only what the model has read.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerateRequest, whole: Sequence[int], sent: str | None
    ) -> None:
        """`whole` are the prompt's ids before they were cut; `sent` is what a client spelt out."""
        self._tokenizer, self._ids = tokenizer, request.prompt_ids
        self._sampling, self._lead, size = request.sampling, 0, len(whole)
        if sent is not None:
            # Special tokens that the client spelt out are text, those that the tokenizer added not.
            self._sampling = msgspec.structs.replace(self._sampling, skip_special_tokens=False)
            self._lead, size = _place(tokenizer.encode(sent, add_special_tokens=False), whole)
        self._spelt = self._ids[self._lead : self._lead + size]
        was_cut = len(self._ids) < len(whole)
        self.text = self._decoded() if sent is None or was_cut else sent

    def offsets(self) -> list[int]:
        """Return the character at which each id begins."""
        places = _Places(self._tokenizer, self._sampling)
        found = [places.next(token_id) for token_id in self._spelt]
        lead = [0] * len(self._ids[: self._lead])
        return [*lead, *found, *[len(self.text)] * (len(self._ids) - len(lead) - len(found))]

    def _decoded(self) -> str:
        return self._tokenizer.decode(
            self._spelt,
            skip_special_tokens=self._sampling.skip_special_tokens,
            spaces_between_special_tokens=self._sampling.spaces_between_special_tokens,
        )


def _place(part: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """Return where `part` begins in `whole`, and how long it is."""
    part, whole = tuple(part), tuple(whole)
    for at in range(len(whole) - len(part) + 1):
        if whole[at : at + len(part)] == part:
            return at, len(part)
    return 0, len(whole)  # what the tokenizer added changed how the text is cut


class _Places:
    """The character at which each token of a growing text begins."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        context: Sequence[int] = (),
        *,
        start: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer, sampling, context)
        self._at = start

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._stream.push(token_id))
        return at
