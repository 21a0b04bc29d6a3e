# SPDX-License-Identifier: Apache-2.0
"""`tetrarch eval arithmetic [MODEL] [settings]`: how well a model solves generated word problems.

Two gauges: greedy accuracy (the number behind the last `####`), and the answer NLL, the mean
negative log-likelihood per token of the worked solution, end token included. Accuracy shows that a
model works; the NLL is fine enough to show what a quantization costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tetrarch.commands.arithmetic.problems import Problem, Split, answer_of, eval_split
from tetrarch.commands.bars import Bars
from tetrarch.commands.loading import load
from tetrarch.config.cli import Reading
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import Plan
from tetrarch.core.log import configure_logging
from tetrarch.core.progress import Progress
from tetrarch.engine.request import SamplingParams
from tetrarch.llm import LLM, Logprobs, Output
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch

__all__ = ["Score", "measure", "run"]

_LONGEST_SOLUTION = 256  # tokens; the longest of 2,000 hard problems has 190


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one split says about a model.

    Attributes:
        num_problems: How many were asked.
        accuracy: Share whose number is right.
        answer_nll: Nats per token of the reference solutions.
        num_answer_tokens: Tokens behind `answer_nll`.
        tokens_per_s: Output tokens a second while generating.
        spec_accept_length: Tokens that a verification of drafts yielded; `None` without any.
    """

    num_problems: int
    accuracy: float
    answer_nll: float
    num_answer_tokens: int
    tokens_per_s: float
    spec_accept_length: float | None = None


def run(reading: Reading) -> int:
    """Measure, print JSON, and return the exit status.

    Raises:
        TetrarchError: What is wrong with the launch.
    """
    asked = reading.namespace
    configure_logging(level=reading.args.log_level)
    plan = plan_launch(reading, describe=describe, fetch=fetch)
    problems = list(islice(eval_split(Split(asked.split)), asked.limit))
    with Bars() as bars, load(plan, bars) as llm:
        score = measure(llm, problems, progress=bars)
    row = json.dumps({**_subject(plan), "split": asked.split, **asdict(score)}, indent=1)
    print(row)
    if asked.out is not None:
        asked.out.write_text(row + "\n")
    return 0


def measure(llm: LLM, problems: Sequence[Problem], *, progress: Progress) -> Score:
    """Ask all problems greedily, then score the reference solutions."""
    prompts = [
        llm.tokenizer.encode_chat([{"role": "user", "content": problem.question}])
        for problem in problems
    ]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=_LONGEST_SOLUTION)
    start = time.perf_counter()
    outputs = llm.generate(prompts, greedy, progress=progress)
    seconds = time.perf_counter() - start
    right = sum(
        answer_of(output.text) == problem.answer
        for output, problem in zip(outputs, problems, strict=True)
    )
    nlls = _solution_nlls(llm, prompts, problems, progress)
    return Score(
        num_problems=len(problems),
        accuracy=right / len(problems),
        answer_nll=sum(nlls) / len(nlls),
        num_answer_tokens=len(nlls),
        tokens_per_s=round(sum(len(output.token_ids) for output in outputs) / seconds, 1),
        spec_accept_length=_accept_length(outputs),
    )


def _accept_length(outputs: Sequence[Output]) -> float | None:
    found = [output.acceptance for output in outputs if output.acceptance is not None]
    if not found:
        return None
    return sum(one.num_tokens for one in found) / sum(one.num_verifies for one in found)


def _solution_nlls(
    llm: LLM, prompts: Sequence[list[int]], problems: Sequence[Problem], progress: Progress
) -> list[float]:
    """Return the NLL of every token of every reference solution, and of its end token."""
    end = sorted(llm.tokenizer.eos_ids)[:1]
    nlls: list[float] = []
    # Prompt by prompt, because each starts scoring at its own position.
    scored = SamplingParams(max_new_tokens=0)
    progress.start("scoring", len(problems), "solutions")
    for prompt, problem in zip(prompts, problems, strict=True):
        solution = llm.tokenizer.encode(problem.solution, add_special_tokens=False) + end
        [output] = llm.generate(
            [[*prompt, *solution]], scored, logprobs=Logprobs(start=len(prompt))
        )
        nlls += [-entry.logprob for entry in output.prompt_logprobs]
        progress.advance()
    progress.finish()
    return nlls


def _subject(plan: Plan) -> dict[str, Any]:
    contract = plan.quant.contract
    return {
        "model": plan.model.served_name,
        "quantization": contract.quantization,
        "moe_activations": contract.activations,
        "dtype": plan.model.dtype,
        "device": plan.device.name,
    }
