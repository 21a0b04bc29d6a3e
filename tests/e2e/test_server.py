# SPDX-License-Identifier: Apache-2.0
"""The whole server with the demo model: what clients send, what they read, and what may die."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunningServer

SUM = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "12 + 30 = 42.\n#### 42"
PROMPT = [5, 6, 7]
EIGHT = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
EOS = 2


def greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 40, **more}


def refusal(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.http.post("/generate", json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# /generate: outputs


def test_a_prompt_is_answered(server: RunningServer) -> None:
    reply = server.generate(text=SUM, sampling_params=greedy())
    assert reply["text"] == ANSWER
    info = reply["meta_info"]
    assert info["finish_reason"] == {"type": "stop", "matched": EOS}
    assert reply["output_ids"][-1] == EOS
    assert info["prompt_tokens"] == 18
    assert info["completion_tokens"] == len(reply["output_ids"]) == 16
    assert info["weight_version"] == "default"
    assert info["weight_versions"] == [{"version": "default", "start": 0, "end": 16}]
    assert 0 < info["first_token_latency"] < info["e2e_latency"] < 10


def test_ids_and_text_are_the_same_prompt(server: RunningServer) -> None:
    ids = server.http.post("/tokenize", json={"prompt": SUM}).json()["tokens"]
    reply = server.generate(input_ids=ids, sampling_params=greedy(), return_prompt_token_ids=True)
    assert reply["text"] == ANSWER
    assert reply["prompt_token_ids"] == ids


def test_a_batch_keeps_its_order(server: RunningServer) -> None:
    sums = [SUM.replace("30", str(number)) for number in (30, 45, 7)]
    replies = server.generate(
        text=sums, sampling_params=[greedy(), greedy(), greedy(max_new_tokens=3)], rid="batch"
    )
    assert [reply["text"] for reply in replies] == [
        ANSWER,
        "12 + 45 = 57.\n#### 57",
        "12 +",
    ]
    assert [reply["meta_info"]["id"] for reply in replies] == ["batch_0", "batch_1", "batch_2"]
    assert replies[2]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_n_outputs_differ_unless_greedy(server: RunningServer) -> None:
    free = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 5, "sampling_seed": 1}
    three = server.generate(input_ids=PROMPT, sampling_params={**free, "n": 3})
    assert len({tuple(reply["output_ids"]) for reply in three}) == 3
    one, again = (server.generate(input_ids=PROMPT, sampling_params=free) for _ in range(2))
    assert one["output_ids"] == again["output_ids"]
    same = server.generate(input_ids=PROMPT, sampling_params={**EIGHT, "n": 2})
    assert same[0]["output_ids"] == same[1]["output_ids"]


def test_a_stream_is_cumulative(server: RunningServer) -> None:
    whole = server.generate(text=SUM, sampling_params=greedy())
    events = server.events(text=SUM, sampling_params=greedy())
    assert len(events) > 10
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
    assert events[-1]["text"] == whole["text"] == ANSWER
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_an_incremental_stream_adds_up(server: RunningServer) -> None:
    events = server.events(text=SUM, sampling_params=greedy(), incremental=True)
    whole = server.generate(text=SUM, sampling_params=greedy())
    assert "".join(event["text"] for event in events) == ANSWER
    assert [i for event in events for i in event["output_ids"]] == whole["output_ids"]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 16


def test_a_streamed_batch_names_the_index(server: RunningServer) -> None:
    texts = {0: "", 1: ""}
    prompts = [SUM, SUM.replace("30", "45")]
    for event in server.events(text=prompts, sampling_params=greedy()):
        texts[event["index"]] = event["text"]
    assert texts == {0: ANSWER, 1: "12 + 45 = 57.\n#### 57"}


def test_stop_strings_end_the_text(server: RunningServer) -> None:
    cut = server.generate(text=SUM, sampling_params=greedy(stop=["\n####"]))
    assert cut["text"] == "12 + 30 = 42."
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\n####"}
    kept = server.generate(text=SUM, sampling_params=greedy(stop="= 42", no_stop_trim=True))
    assert kept["text"] == "12 + 30 = 42"


def test_a_repeated_prompt_is_cached_and_says_so(server: RunningServer) -> None:
    prompt = [40 + i % 50 for i in range(100)]
    first = server.generate(input_ids=prompt, sampling_params=EIGHT)
    second = server.generate(input_ids=prompt, sampling_params=EIGHT)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 96  # whole pages of 16
    assert second["output_ids"] == first["output_ids"]


# /generate: logprobs


def test_logprobs_are_triples_and_the_first_is_null(server: RunningServer) -> None:
    reply = server.generate(
        input_ids=PROMPT,
        sampling_params=EIGHT,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[18, 223],
    )
    info = reply["meta_info"]
    assert [triple[1] for triple in info["input_token_logprobs"]] == PROMPT
    assert info["input_token_logprobs"][0] == [None, 5, None]
    assert info["input_top_logprobs"][0] is None
    outputs = info["output_token_logprobs"]
    assert [triple[1] for triple in outputs] == reply["output_ids"]
    assert info["output_token_logprobs_length"] == 8
    for chosen, top in zip(outputs, info["output_top_logprobs"], strict=True):
        assert chosen == top[0]  # greedy: the same float, not a close one
        assert 0 >= top[0][0] >= top[1][0]
    assert [[t[1] for t in ids] for ids in info["output_token_ids_logprobs"]] == [[18, 223]] * 8


def test_a_prompt_is_scored_without_generating(server: RunningServer) -> None:
    score = {"max_new_tokens": 0}
    ask = {"input_ids": [*PROMPT, 697, 223], "return_logprob": True, "sampling_params": score}
    whole = server.generate(**ask, logprob_start_len=0)
    tail = server.generate(**ask, logprob_start_len=3)
    assert whole["output_ids"] == []
    assert whole["text"] == ""
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    scored = tail["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in scored] == [697, 223]
    assert scored[0][0] == pytest.approx(whole["meta_info"]["input_token_logprobs"][3][0], abs=0.02)
    drawn = server.generate(input_ids=PROMPT, sampling_params=EIGHT, return_logprob=True)
    chosen = drawn["meta_info"]["output_token_logprobs"]
    assert chosen[0][1] == 697
    assert scored[0][0] == pytest.approx(chosen[0][0], abs=0.02)


def test_token_text_comes_on_request(server: RunningServer) -> None:
    reply = server.generate(
        text=SUM, sampling_params=greedy(), return_logprob=True, return_text_in_logprobs=True
    )
    triples = reply["meta_info"]["output_token_logprobs"]
    assert "".join(text for _, token, text in triples if token != EOS) == ANSWER


def test_logprob_fields_mean_nothing_unless_logprobs_are_wanted(server: RunningServer) -> None:
    reply = server.generate(input_ids=PROMPT, sampling_params=EIGHT, logprob_start_len=99)
    assert "output_token_logprobs" not in reply["meta_info"]


# /generate: refusals


def test_an_unknown_sampling_key_is_refused_with_the_names(server: RunningServer) -> None:
    error = refusal(server, input_ids=PROMPT, sampling_params={"max_tokens": 5})
    assert error["param"] == "max_tokens"
    assert error["code"] == 400
    assert "max_new_tokens" in error["message"]
    assert "repetition_penalty" in error["message"]


@pytest.mark.parametrize("bad", [1024, -1, 2**63])
def test_an_id_outside_the_vocabulary_is_refused(server: RunningServer, bad: int) -> None:
    error = refusal(server, input_ids=[5, bad], sampling_params=EIGHT)
    assert error["param"] == "input_ids"
    assert "1023" in error["message"]
    assert str(bad) in error["message"]


def test_an_overlong_prompt_is_refused_with_both_numbers(server: RunningServer) -> None:
    error = refusal(server, input_ids=[5] * 2048, sampling_params=EIGHT)
    assert "2048" in error["message"]
    assert "2047" in error["message"]
    fits = server.generate(input_ids=[5] * 2047, sampling_params=EIGHT)
    assert fits["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("temperature", -0.5, "0"),
        ("top_p", 0, "1"),
        ("top_k", 0, "-1"),
        ("max_new_tokens", -1, "0"),
        ("frequency_penalty", 2.5, "2"),
        ("repetition_penalty", 0, "2"),
        ("stop_token_ids", [4096], "1023"),
        ("min_p", "half", "1"),
    ],
)
def test_a_value_out_of_bounds_is_refused(
    server: RunningServer, key: str, value: Any, bound: str
) -> None:
    error = refusal(server, input_ids=PROMPT, sampling_params={key: value})
    assert error["param"] == key
    assert bound in error["message"]


def test_a_refusal_is_a_status_even_when_streaming(server: RunningServer) -> None:
    error = refusal(server, input_ids=[4096], stream=True)
    assert error["param"] == "input_ids"


def test_logprobs_beyond_the_prompt_are_refused(server: RunningServer) -> None:
    error = refusal(server, input_ids=PROMPT, return_logprob=True, logprob_start_len=4)
    assert error["param"] == "logprob_start_len"
    assert "3" in error["message"]


def test_one_bad_prompt_of_a_batch_refuses_the_batch(server: RunningServer) -> None:
    error = refusal(server, input_ids=[[5], [5000]], sampling_params=LONG)
    assert error["param"] == "input_ids"
    server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=2)


# Abort, flush, load


def in_background(server: RunningServer, pool: ThreadPoolExecutor, rid: Any, **more: Any) -> Any:
    """Start a long request and wait until it runs."""
    before = server.load()["num_running_reqs"]
    body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": rid, **more}
    future = pool.submit(lambda: server.generate(**body))
    server.wait_for(lambda load: load["num_running_reqs"] > before, seconds=5)
    return future


def abort(server: RunningServer, **body: Any) -> int:
    response = server.http.post("/abort_request", json=body)
    assert response.status_code == 200
    return response.json()["aborted"]


def test_an_abort_takes_exactly_its_id_and_keeps_the_text(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        futures = {rid: in_background(server, pool, rid) for rid in ("a", "ab", "abc")}
        taken = server.http.post("/generate", json={"input_ids": PROMPT, "rid": "ab"})
        assert taken.status_code == 400
        assert taken.json()["error"]["param"] == "rid"
        busy = server.http.get("/flush_cache", headers={"Accept": "application/json"})
        assert busy.status_code == 400
        assert busy.json()["success"] is False
        assert abort(server, rid="nobody") == 0
        assert abort(server, rid="ab") == 1
        reply = futures["ab"].result(5)
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply["text"].startswith(" bake 0")
        assert 0 < reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) < 1500
        assert server.load()["num_running_reqs"] == 2
        assert not futures["a"].done()
        assert not futures["abc"].done()
        assert abort(server, rid="a", prefix=True) == 2
        assert futures["a"].result(5)["text"]
        assert futures["abc"].result(5)["text"]


def test_everything_can_be_aborted_while_streaming(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        whole = in_background(server, pool, ["x", "y"], input_ids=[PROMPT, [8, 9]])
        streamed = pool.submit(
            lambda: server.events(input_ids=PROMPT, sampling_params=LONG, rid="stream")
        )
        server.wait_for(lambda load: load["num_running_reqs"] == 3, seconds=5)
        assert abort(server, abort_all=True) == 3
        finishes = [reply["meta_info"]["finish_reason"] for reply in whole.result(5)]
        assert [finish["type"] for finish in finishes] == ["abort", "abort"]
        assert streamed.result(5)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_prompt_of_a_batch_is_aborted_with_all_its_outputs(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        sampling = {**LONG, "n": 2}
        future = in_background(
            server, pool, ["x", "y"], input_ids=[PROMPT, [8, 9]], sampling_params=sampling
        )
        server.wait_for(lambda load: load["num_running_reqs"] == 4, seconds=5)
        assert abort(server, rid="x") == 2
        server.wait_for(lambda load: load["num_running_reqs"] == 2, seconds=2)
        assert abort(server, rid="y_1") == 1
        assert abort(server, rid="y") == 1
        ids = [reply["meta_info"]["id"] for reply in future.result(5)]
        assert ids == ["x_0", "x_1", "y_0", "y_1"]


def test_a_flush_empties_the_cache(server: RunningServer) -> None:
    server.generate(input_ids=[9] * 64, sampling_params=EIGHT)
    assert server.wait_for(lambda load: load["num_cached_tokens"] >= 64, seconds=3) < 3
    text = server.http.post("/flush_cache?timeout=5")
    assert text.status_code == 200
    assert text.headers["content-type"].startswith("text/plain")
    server.wait_for(lambda load: load["num_cached_tokens"] == 0, seconds=3)
    again = server.generate(input_ids=[9] * 64, sampling_params=EIGHT)
    assert again["meta_info"]["cached_tokens"] == 0
    reply = server.http.get("/flush_cache", headers={"Accept": "application/json"})
    assert reply.json()["success"] is True


def test_a_flush_waits_for_running_requests(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        future = in_background(server, pool, "w", sampling_params={**LONG, "max_new_tokens": 120})
        reply = server.http.post("/flush_cache?timeout=20")
        assert reply.status_code == 200
        assert future.result(5)["meta_info"]["completion_tokens"] == 120


# A client that goes


@pytest.mark.parametrize("stream", [True, False])
def test_pages_are_free_within_a_second_of_a_disconnect(
    server: RunningServer, stream: bool
) -> None:
    body = json.dumps({"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /generate HTTP/1.1\r\nHost: {host}\r\nAuthorization: "
            f"{server.http.headers['authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        server.wait_for(lambda load: load["num_running_reqs"] == 1, seconds=5)
        server.wait_for(lambda load: load["num_used_tokens"] > 0, seconds=5)
    free = server.wait_for(
        lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0, seconds=3
    )
    assert free < 1.0


def test_a_retry_under_the_same_id_starts_anew(server: RunningServer) -> None:
    """A client that times out and posts again must not read what its first try left."""
    expected = server.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]
    for _ in range(5):
        body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": "retry", "stream": True}
        with server.http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
        deadline = time.monotonic() + 2
        while True:
            retry = server.http.post(
                "/generate",
                json={"input_ids": PROMPT, "sampling_params": EIGHT, "rid": "retry"},
            )
            if retry.status_code == 200:
                break
            assert time.monotonic() < deadline, retry.text
        assert retry.json()["output_ids"] == expected


# What it says about itself


def test_probes_answer(server: RunningServer) -> None:
    for path in ("/health", "/health/", "/ready", "/ping"):
        assert server.http.get(path).status_code == 200
    before = server.http.get("/metrics").text
    assert server.http.get("/health_generate").status_code == 200
    after = server.http.get("/metrics").text
    ttft = [line for line in before.splitlines() if "time_to_first_token_seconds_count" in line]
    assert ttft[0] in after  # a probe is not traffic
    server.wait_for(lambda load: load["num_running_reqs"] == 0, seconds=5)  # but runs like any


def test_a_busy_server_is_healthy_at_once(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        future = in_background(server, pool, "busy")
        began = time.monotonic()
        assert server.http.get("/health_generate").status_code == 200
        assert time.monotonic() - began < 1.0
        assert abort(server, rid="busy") == 1
        future.result(5)


def test_the_model_is_described(server: RunningServer) -> None:
    info = server.http.get("/model_info").json()
    assert info["model_path"].endswith("demo_model")
    assert info["served_model_name"] == "tetrarch-demo"
    assert info["architectures"] == ["Qwen3MoeForCausalLM"]
    assert info["is_generation"] is True
    assert server.http.get("/get_model_info").json() == info
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["id"] == "tetrarch-demo"
    assert card["max_model_len"] == 2048


def test_the_server_is_described_without_its_secret(server: RunningServer) -> None:
    response = server.http.get("/server_info")
    info = response.json()
    assert info["api_key"] == "***"
    assert "open-sesame" not in response.text
    assert "--api-key ***" in info["launch_command"]
    assert info["port"] == int(server.url.rpartition(":")[2])
    assert info["max_total_num_tokens"] == 8192
    assert info["max_req_input_len"] == 2047
    assert info["quantization"] == "nvfp4_online"
    [state] = info["internal_states"]
    assert state["memory_usage"]["token_capacity"] == 8192
    assert state["memory_usage"]["weight"] == pytest.approx(15.5e-3, rel=0.1)
    assert state["memory_usage"]["startup_available"] > state["memory_usage"]["weight"]
    assert 0 < info["engine"]["load_report"]["seconds"] < info["startup_time"]
    assert "avg_spec_accept_length" not in state


def test_the_key_is_needed(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer wrong"}
    assert server.http.get("/v1/models", headers=headers).status_code == 401
    assert server.http.get("/health", headers=headers).status_code == 200


def counter(server: RunningServer, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def test_metrics_count_what_was_served(server: RunningServer) -> None:
    names = {
        "sglang:prompt_tokens_total": 3,
        "sglang:generation_tokens_total": 8,
        "sglang:num_requests_total": 1,
        "sglang:time_to_first_token_seconds_count": 1,
        "sglang:inter_token_latency_seconds_count": 7,
        "sglang:e2e_request_latency_seconds_count": 1,
    }
    time.sleep(1.1)  # counters come with the engine's heartbeat
    before = {name: counter(server, name) for name in names}
    server.generate(input_ids=PROMPT, sampling_params=EIGHT)
    time.sleep(1.1)
    grown = {name: counter(server, name) - before[name] for name in names}
    assert grown == names
    assert counter(server, "sglang:max_total_num_tokens") == 8192
    assert counter(server, "sglang:token_usage") == 0
    assert counter(server, "sglang:weight_load_duration_seconds_count") == 1
    assert counter(server, "tetrarch:moe_buffer_capacity_tokens") == 576


# The end


def test_a_killed_engine_ends_streams_and_refuses_at_once(own_server: RunningServer) -> None:
    server = own_server
    lines: list[str] = []
    started = threading.Event()

    def stream() -> None:
        body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": True}
        with server.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                started.set()

    with ThreadPoolExecutor() as pool:
        streaming = pool.submit(stream)
        waiting = pool.submit(
            lambda: server.http.post(
                "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
            )
        )
        assert started.wait(10)
        server.wait_for(lambda load: load["num_running_reqs"] == 2, seconds=5)
        began = time.monotonic()
        server.engine.send_signal(signal.SIGKILL)
        streaming.result(5)
        refused = waiting.result(5)
        assert time.monotonic() - began < 2.0
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 503
    assert "signal 9" in json.loads(events[-2])["error"]["message"]
    assert refused.status_code == 503
    assert refused.json()["code"] == 503
    for path in ("/health", "/ready", "/health_generate", "/v1/loads"):
        assert server.http.get(path).status_code == 503
    began = time.monotonic()
    late = server.http.post("/generate", json={"input_ids": PROMPT})
    assert late.status_code == 503
    assert late.headers["retry-after"]
    assert late.json()["error"]["code"] == 503
    assert server.http.get("/flush_cache").status_code == 503
    assert server.http.post("/abort_request", json={"abort_all": True}).status_code == 503
    assert time.monotonic() - began < 1.0
    assert server.stop() == 1
    assert "was killed by signal 9" in server.log.read_text()


def test_a_told_server_ends_clean(own_server: RunningServer) -> None:
    engine = own_server.engine
    own_server.generate(input_ids=PROMPT, sampling_params=EIGHT)
    began = time.monotonic()
    assert own_server.stop() == 0
    assert time.monotonic() - began < 9  # of the ten that requests have
    assert not engine.is_running()
    assert "Traceback" not in own_server.log.read_text()


def test_a_busy_port_is_reported_with_a_remedy(server: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "tetrarch", "serve", "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert f"--port {int(port) + 1}" in second.stderr
    assert "Traceback" not in second.stderr
