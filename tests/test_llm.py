# SPDX-License-Identifier: Apache-2.0
"""The offline door: a real engine process, the demo model, plain Python."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tetrarch import LLM, Logprobs, SamplingParams
from tetrarch.core.errors import EngineDead, LaunchErrors, RequestError

QUESTION = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096, threads=1) as llm:
        yield llm


def test_the_demo_model_adds(llm: LLM) -> None:
    [output] = llm.generate(QUESTION, GREEDY)
    assert output.text == "12 + 30 = 42.\n#### 42"
    assert output.finish_reason.kind == "stop"
    assert output.token_ids[-1] == output.finish_reason.matched


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    by_text, by_ids, by_list = (
        llm.generate(QUESTION, GREEDY),
        llm.generate(ids, GREEDY),
        llm.generate([ids], GREEDY),
    )
    assert by_text[0].token_ids == by_ids[0].token_ids == by_list[0].token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [QUESTION.replace("12", str(number)) for number in (10, 40, 7)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=32, n=2))
    assert [(out.prompt_index, out.index) for out in outputs] == [
        (at, index) for at in range(3) for index in range(2)
    ]
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    assert [out.text for out in outputs] == [text for text in alone for _ in range(2)]
    assert len(set(alone)) == 3


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    few, many = llm.generate(
        [QUESTION, QUESTION],
        [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (3, 9)],
    )
    assert (len(few.token_ids), len(many.token_ids)) == (3, 9)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate([QUESTION], [GREEDY, GREEDY])


def test_a_prompt_is_scored_without_generating(llm: LLM) -> None:
    """Teacher forcing gives each greedy token the logprob it had when it was generated."""
    [said] = llm.generate(QUESTION, GREEDY, logprobs=Logprobs())
    whole = [*said.prompt_ids, *said.token_ids]
    [scored] = llm.generate(
        [whole],
        SamplingParams(max_new_tokens=0),
        logprobs=Logprobs(start=len(said.prompt_ids)),
    )
    assert scored.token_ids == ()
    assert [entry.token_id for entry in scored.prompt_logprobs] == list(said.token_ids)
    for now, then in zip(scored.prompt_logprobs, said.logprobs, strict=True):
        assert now.logprob == pytest.approx(then.logprob, abs=2e-2)  # BF16, other batch shape


def test_a_bad_call_is_refused_and_the_next_one_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="top_p"):
        llm.generate(QUESTION, SamplingParams(top_p=7.0))
    with pytest.raises(RequestError):
        llm.generate([[999_999]], GREEDY)
    unreadable: Any
    for unreadable in ([True], [[1, -1]], [5, "text"], "\ud800"):
        with pytest.raises(RequestError):
            llm.generate(unreadable, GREEDY)
    assert llm.generate([], GREEDY) == []
    assert llm.generate(QUESTION, GREEDY)[0].text.endswith("#### 42")


@pytest.mark.parametrize("wrong", [True, 3, {"top": 2}])
def test_logprobs_of_another_type_are_refused_with_what_they_take(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="start, top, token_ids") as caught:
        llm.generate(QUESTION, GREEDY, logprobs=wrong)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_model_is_not_the_demo_model(empty: str) -> None:
    with pytest.raises(LaunchErrors, match=r"model: ' ?' is not a non-empty text"):
        LLM(empty)


def test_a_closed_llm_says_how_to_go_on() -> None:
    with LLM(max_total_tokens=2048, threads=1) as llm:
        pass
    with pytest.raises(EngineDead, match="this LLM is closed") as caught:
        llm.generate(QUESTION)
    assert "LLM(" in caught.value.fix
    assert "server" not in str(caught.value)


def test_a_killed_engine_says_how_to_go_on() -> None:
    with LLM(max_total_tokens=2048, threads=1) as llm:
        os.kill(llm._engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by signal 9") as caught:
            llm.generate(QUESTION)
    assert "LLM(" in caught.value.fix
    assert "server" not in str(caught.value)


def test_threads_take_turns(llm: LLM) -> None:
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(llm.generate, [QUESTION] * 2, GREEDY) for _ in range(4)]
        texts = {out.text for call in calls for out in call.result(timeout=60)}
    assert texts == {"12 + 30 = 42.\n#### 42"}


def test_chat_renders_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], GREEDY)
    assert output.prompt_ids == tuple(llm.tokenizer.encode(QUESTION))
    assert output.text.endswith("#### 42")


def test_unknown_settings_are_refused_with_a_suggestion() -> None:
    with pytest.raises(LaunchErrors, match="max_total_tokens"):
        LLM(max_total_token=1)


def test_a_script_needs_no_main_guard_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from tetrarch import LLM, SamplingParams
            llm = LLM(max_total_tokens=2048, threads=1)
            print(llm._engine.pid)
            print(llm.generate({QUESTION!r}, SamplingParams(temperature=0.0))[0].text)
            """
        )
    )
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    pid, *text = ran.stdout.splitlines()
    assert text == ["12 + 30 = 42.", "#### 42"], ran.stderr
    assert not Path(f"/proc/{pid}").exists()


def test_a_dummy_generates_ids_from_config_json_alone(demo_path: Path, tmp_path: Path) -> None:
    shutil.copy(demo_path / "config.json", tmp_path)
    settings = dict(load_format="dummy", max_total_tokens=4096, threads=1)
    fixed = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), **settings) as llm:
        [output] = llm.generate([3, 4, 5], fixed)
        assert (len(output.token_ids), output.text) == (8, "")
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text", fixed)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate([3], SamplingParams(stop=("x",)))
