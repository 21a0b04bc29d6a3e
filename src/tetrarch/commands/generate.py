# SPDX-License-Identifier: Apache-2.0
"""`tetrarch generate [MODEL] --prompt TEXT [settings]`: print what a model says."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from tetrarch.commands.bars import Bars
from tetrarch.commands.loading import load
from tetrarch.config.cli import Reading
from tetrarch.config.launch import plan_launch
from tetrarch.core.log import configure_logging
from tetrarch.engine.sampling import parse_sampling
from tetrarch.llm import LLM, Output
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch

__all__ = ["run"]


def run(reading: Reading) -> int:
    """Generate, print, and return the exit status.

    Raises:
        TetrarchError: What is wrong with the launch or the request.
    """
    asked = reading.namespace
    configure_logging(level=reading.args.log_level)
    plan = plan_launch(reading, describe=describe, fetch=fetch)
    sampling = parse_sampling(
        {
            "max_new_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "sampling_seed": asked.seed,
            "n": asked.n,
        },
        vocab_size=plan.model.facts.vocab_size,
    )
    with Bars() as bars, load(plan, bars) as llm:
        texts = [sys.stdin.read() if text == "-" else text for text in asked.prompt]
        outputs = llm.generate(
            [text if asked.raw else _question(llm, text) for text in texts], sampling, progress=bars
        )
    for output in outputs:
        print(json.dumps(_row(output), ensure_ascii=False) if asked.json else output.text)
    return 0


def _question(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def _row(output: Output) -> dict[str, Any]:
    return {
        "prompt": output.prompt_index,
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": msgspec.structs.asdict(output.finish_reason),
    }
