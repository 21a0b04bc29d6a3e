# SPDX-License-Identifier: Apache-2.0
"""Without a tokenizer ids are served: text is refused, and outputs have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.engine.stream import OutputText
from tetrarch.engine.textless import Textless, tokenizer_of


def test_a_plan_without_a_tokenizer_gets_one_that_refuses_text(
    make_plan: Any, demo_path: Path
) -> None:
    """Negative control: the same plan with its tokenizer."""
    textless = tokenizer_of(make_plan(demo_path, model={"tokenizer_path": None}))
    for call in (lambda: textless.encode("x"), lambda: textless.encode_chat([])):
        with pytest.raises(RequestError, match="no tokenizer"):
            call()
    assert tokenizer_of(make_plan(demo_path)).encode("x")


def test_ids_have_no_text() -> None:
    textless = Textless()
    assert (textless.decode([1]), textless.token_text(1), textless.token_bytes(1)) == ("", "", b"")
    assert (textless.vocab_size, textless.eos_ids) == (0, frozenset())
    stream = OutputText(textless, SamplingParams(), (1, 2))
    assert stream.push((3, 4), None) == ""
