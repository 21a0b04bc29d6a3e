# SPDX-License-Identifier: Apache-2.0
"""The offline door: generate from a Python program, without a server.

The engine still runs in a process of its own, with the environment and the thread count that the
plan gives it; it works from scripts without a `__main__` guard, from `python -c` and notebooks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from tetrarch.config.cli import read_keywords
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import Plan
from tetrarch.core.errors import EngineDead, RequestError
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.engine.acceptance import Acceptance
from tetrarch.engine.connection import Connection
from tetrarch.engine.messages import Abort
from tetrarch.engine.offline import (
    Logprobs,
    check_logprobs,
    check_readable,
    list_prompts,
    list_sampling,
)
from tetrarch.engine.process import EngineProcess
from tetrarch.engine.request import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    fan_out,
)
from tetrarch.engine.sampling import check_sampling
from tetrarch.engine.stream import OutputText
from tetrarch.engine.text import Tokenizer
from tetrarch.engine.textless import tokenizer_of
from tetrarch.executor.step import TokenLogprob
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch

__all__ = ["LLM", "Logprobs", "Output", "Prompt"]

Prompt = str | Sequence[int]
_WHOLE = 1 << 20  # tokens gathered before a delta is sent: nobody reads along


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of one prompt.

    Attributes:
        prompt_index: Position of the prompt in the call.
        index: Which of the prompt's `n` outputs.
        prompt_ids: The prompt's tokens.
        text: Without the stop string or end token that ended it.
        token_ids: With them.
        finish_reason: Why it ended.
        logprobs: One per token, if asked for.
        prompt_logprobs: One per scored prompt token, if asked for.
        num_cached: Prompt tokens that the prefix cache held.
        acceptance: What drafts have brought; `None` where none was verified.
    """

    prompt_index: int
    index: int
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    num_cached: int
    acceptance: Acceptance | None = None


class LLM:
    """A model, ready to generate. A context manager; `close` ends the engine."""

    def __init__(
        self,
        model: str | None = None,
        *,
        plan: Plan | None = None,
        progress: Progress | None = None,
        **settings: object,
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            model: Folder or hub name; the demo model that ships with tetrarch by default.
            plan: A plan that was resolved already, instead of model and settings.
            progress: Shows how far loading has come.
            **settings: Any field of `LaunchArgs`, by name.

        Raises:
            LaunchErrors: Everything that is wrong with the settings.
            TetrarchError: What stopped the engine's start.
        """
        self.plan = plan or plan_launch(
            read_keywords(settings if model is None else {"model": model, **settings}),
            describe=describe,
            fetch=fetch,
        )
        self.tokenizer: Tokenizer = tokenizer_of(self.plan)
        self._engine = EngineProcess(self.plan)
        try:
            self._engine.wait_ready(progress)
        except BaseException:
            self._engine.close()
            raise
        self._connection = Connection(self._engine)
        self._is_closed = False
        self._numbers = itertools.count()
        self._turn = threading.Lock()  # one reader: a second one would take the first one's deltas

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logprobs: Logprobs | None = None,
        progress: Progress | None = None,
    ) -> list[Output]:
        """Generate for all prompts together, and return their outputs in order.

        Calls from several threads take turns.

        Args:
            prompts: One text, one list of ids, or a list of either.
            sampling: For all prompts, or one each.
            logprobs: What to report; nothing by default.
            progress: Shows how many outputs are done.

        Raises:
            RequestError: A prompt or a parameter is refused; nothing of the call goes on running.
            EngineDead: The engine ended, or was closed.
        """
        if self._is_closed:
            raise EngineDead(
                "this LLM is closed",
                why="close() was called, or its with block has ended",
                fix="make another one: LLM(...)",
            )
        wanted = check_logprobs(logprobs)
        jobs = list(self._jobs(prompts, sampling, wanted, asked=logprobs is not None))
        shown = progress or NoProgress()
        shown.start("generating", len(jobs), "outputs")
        try:
            with self._turn:
                self._run(jobs, shown)
        finally:
            shown.finish()
        return [job.output() for job in jobs]

    def chat(
        self,
        messages: Sequence[dict[str, object]],
        sampling: SamplingParams | None = None,
    ) -> Output:
        """Answer one conversation, rendered with the model's chat template.

        Raises:
            RequestError: The template or the engine refuses it.
        """
        return self.generate([self.tokenizer.encode_chat(messages)], sampling)[0]

    def close(self) -> None:
        """End the engine; once is enough."""
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, jobs: list[_Job], shown: Progress) -> None:
        """Send all jobs, and give them what comes back until all are done."""
        pending = {job.request.rid: job for job in jobs}
        try:
            for job in jobs:
                self._connection.send(job.request)
            while pending:
                for delta in self._connection.receive():
                    if isinstance(delta, Delta) and delta.rid in pending:
                        pending[delta.rid].take(delta)
                        if delta.finish is not None:
                            del pending[delta.rid]
                            shown.advance()
        except EngineDead:
            raise
        except BaseException:  # refused, interrupted: the others must not run on
            for rid in pending:
                self._connection.send(Abort(rid=rid, quiet=True))
            raise

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        wanted: Logprobs,
        *,
        asked: bool,
    ) -> Iterable[_Job]:
        listed = list_prompts(prompts)
        each = list_sampling(sampling, len(listed))
        vocab_size = self.plan.model.facts.vocab_size
        for at, (prompt, params) in enumerate(zip(listed, each, strict=True)):
            checked = check_sampling(params, vocab_size=vocab_size)
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            request = GenerateRequest(
                rid=str(next(self._numbers)),
                prompt_ids=tuple(ids),
                sampling=msgspec.structs.replace(checked, stream_interval=_WHOLE),
                return_logprobs=asked,
                logprob_start=wanted.start,
                top_logprobs=wanted.top,
                logprob_ids=wanted.token_ids,
            )
            for index, one in enumerate(fan_out(check_readable(request))):
                yield _Job(one, at, index, self.tokenizer)


class _Job:
    """One output while it is being generated."""

    def __init__(
        self, request: GenerateRequest, prompt_index: int, index: int, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self._place = (prompt_index, index)
        self._text = OutputText(tokenizer, request.sampling, request.prompt_ids)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        """Add what is new.

        Raises:
            RequestError: The engine refused or failed the request.
        """
        finish = delta.finish
        if finish is not None and finish.kind == "abort":
            raise RequestError(
                f"prompt {self._place[0]} could not be served",
                why=finish.message or "the request was aborted",
                fix="correct the prompt or the parameters",
                param=finish.param,
            )
        self._pieces.append(self._text.push(delta.token_ids, finish))
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._last = delta

    def output(self) -> Output:
        """Return the finished output."""
        assert self._last is not None
        assert self._last.finish is not None
        return Output(
            prompt_index=self._place[0],
            index=self._place[1],
            prompt_ids=self.request.prompt_ids,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=self._last.finish,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached=self._last.num_cached,
            acceptance=self._last.acceptance,
        )
