# SPDX-License-Identifier: Apache-2.0
"""The whole server with drafts: the same answers, usage that counts tokens, exact counters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunningServer

SUM = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "12 + 30 = 42.\n#### 42"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def state(server: RunningServer) -> dict[str, Any]:
    [state] = server.http.get("/server_info").json()["internal_states"]
    return state


def test_an_answer_is_the_same_and_says_how_its_drafts_have_gone(
    drafting_server: RunningServer,
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 40}
    reply = drafting_server.generate(text=SUM, sampling_params=sampling, return_logprob=True)
    info = reply["meta_info"]
    assert reply["text"] == ANSWER
    assert len(reply["output_ids"]) == info["completion_tokens"] == 16
    assert info["output_token_logprobs_length"] == 16
    assert info["spec_accept_length"] > 2.5
    counted = [sum(info["spec_correct_drafts_histogram"])]
    counted += [info["spec_num_correct_drafts"] + info["spec_verify_ct"]]
    # the prompt yields the first token; a run that the end token cuts has no token of its own
    assert counted[0] == info["spec_verify_ct"]
    assert counted[1] in (15, 16)
    assert info["spec_accept_length"] == 15 / info["spec_verify_ct"]


def test_usage_counts_tokens_however_few_chunks_they_come_in(
    drafting_server: RunningServer,
) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = drafting_server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert whole["completion_tokens"] == 16
    details = whole["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 8
    *chunks, last = drafting_server.events(
        "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    assert last["usage"]["completion_tokens"] == 16
    assert last["usage"]["completion_tokens_details"] == details
    assert len(chunks) < 16, "several tokens to a chunk"
    events = drafting_server.events(
        text=SUM, sampling_params={"temperature": 0, "max_new_tokens": 40}
    )
    for event in events:
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
    assert events[-1]["meta_info"]["completion_tokens"] == 16


def test_counters_are_there_from_the_first_step_and_begin_anew_with_a_flush(
    drafting_server: RunningServer,
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 40}
    drafting_server.generate(text=SUM, sampling_params=sampling)
    drafting_server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=10)
    before = state(drafting_server)
    assert before["avg_spec_accept_length"] > 2.5
    assert drafting_server.http.post("/flush_cache").status_code == 200
    flushed = state(drafting_server)["speculation"]
    assert (flushed["num_steps"], flushed["since_flush"]["num_verifies"]) == (3, 0)
    info = drafting_server.generate(text=SUM, sampling_params=sampling)["meta_info"]
    drafting_server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=10)
    after = state(drafting_server)
    assert after["avg_spec_accept_length"] == info["spec_accept_length"]
    recent, lifetime = (after["speculation"][name] for name in ("since_flush", "lifetime"))
    assert recent["num_verifies"] == info["spec_verify_ct"]
    assert lifetime["num_verifies"] > recent["num_verifies"]
    metrics = drafting_server.http.get("/metrics").text
    assert f'spec_accept_length{{model_name="tetrarch-demo"}} {info["spec_accept_length"]}' in (
        metrics
    )
    total = 'sglang:spec_verify_calls_total{model_name="tetrarch-demo"} '
    assert f"{total}{float(lifetime['num_verifies'])}" in metrics


def test_an_echo_with_logprobs_is_the_same_as_without_drafts(
    drafting_server: RunningServer, server: RunningServer
) -> None:
    body: dict[str, Any] = {"prompt": SUM, "temperature": 0, "max_tokens": 40}
    body |= {"echo": True, "logprobs": 2}
    choices = [
        each.http.post("/v1/completions", json=body).json()["choices"][0]
        for each in (drafting_server, server)
    ]
    found, expected = choices
    assert found["text"] == expected["text"]
    assert found["text"] == SUM + ANSWER
    assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    ours, theirs = (choice["logprobs"]["token_logprobs"] for choice in choices)
    assert ours[0] is theirs[0] is None
    assert ours[1:] == pytest.approx(theirs[1:], abs=0.05)  # four rows at once, in BF16


def test_who_goes_away_in_the_middle_leaves_no_pages_behind(
    drafting_server: RunningServer,
) -> None:
    body = {"text": SUM, "stream": True}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}}
    for _ in range(3):
        with drafting_server.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        drafting_server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=10)
        drafting_server.wait_for(lambda load: load["num_used_tokens"] == 0, seconds=10)
    sampling = {"temperature": 0, "max_new_tokens": 40}
    assert drafting_server.generate(text=SUM, sampling_params=sampling)["text"] == ANSWER


def test_requests_that_are_set_back_say_what_they_say_alone(
    cramped_server: RunningServer,
) -> None:
    """FP32 alone is not enough: activations in NVFP4 turn its last bit into another code."""

    def ask(number: int) -> list[int]:
        prompt = SUM.replace("12", str(number))
        sampling = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
        return cramped_server.generate(text=prompt, sampling_params=sampling)["output_ids"]

    def num_retracted() -> float:
        lines = cramped_server.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("sglang:num_retracted_reqs")]
        return sum(float(line.split()[-1]) for line in found)

    numbers = range(14, 17)
    alone = [ask(number) for number in numbers]
    assert num_retracted() == 0
    with ThreadPoolExecutor(len(numbers)) as crowd:
        assert list(crowd.map(ask, numbers)) == alone
    cramped_server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=10)
    assert num_retracted() > 0
    assert state(cramped_server)["avg_spec_accept_length"] > 1
