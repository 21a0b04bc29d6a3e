# SPDX-License-Identifier: Apache-2.0
"""`tetrarch generate`: what is printed is what the model says."""

from __future__ import annotations

import json

import pytest

from tetrarch.__main__ import main

SMALL = ["--max-total-tokens", "2048", "--threads", "1"]


def test_answers_are_printed_in_order_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "What is 12 + 30?", "--prompt", "What is 40 - 7?"]
    assert main(["generate", *prompts, "--json", *SMALL]) == 0
    printed = capsys.readouterr()
    first, second = map(json.loads, printed.out.splitlines())
    lines = printed.err.splitlines()
    assert any("loading tetrarch-demo as nvfp4_online/per_token" in line for line in lines)
    assert any("ready after" in line for line in lines)
    assert first["text"].endswith("#### 42")
    assert second["text"].endswith("#### 33")
    assert first["finish_reason"]["kind"] == "stop"


@pytest.mark.parametrize(
    ("words", "named"),
    [([], "--prompt"), (["--prompt", "a", "--temperature", "-1"], "temperature")],
)
def test_a_wrong_call_is_refused_before_anything_is_loaded(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *words]) == 1
    assert named in capsys.readouterr().err
