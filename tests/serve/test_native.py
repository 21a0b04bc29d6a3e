# SPDX-License-Identifier: Apache-2.0
"""`/generate` against a scripted engine: what is sent to it, and what comes out."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import ScriptedServer

ANSWER = "The answer is 42. It is 42!"  # the script's, to every prompt
EOS = 2


def logprob_of(token_id: int) -> float:
    """The script's, of every token."""
    return -0.5 - token_id / 1024


def generate(server: ScriptedServer, **body: Any) -> Any:
    reply = server.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    reply = server.http.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def events(server: ScriptedServer, **body: Any) -> list[Any]:
    reply = server.http.post("/generate", json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = reply.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_a_prompt_gives_one_object(server: ScriptedServer) -> None:
    reply = generate(server, input_ids=[5, 6], rid="mine", return_prompt_token_ids=True)
    assert reply["text"] == ANSWER
    assert reply["output_ids"] == [*server.engine.tokenizer.encode(ANSWER), EOS]
    assert reply["prompt_token_ids"] == [5, 6]
    assert reply["meta_info"]["id"] == "mine"
    assert reply["meta_info"]["prompt_tokens"] == 2
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_put_is_post(server: ScriptedServer) -> None:
    assert server.http.put("/generate", json={"text": "x"}).json()["text"] == ANSWER


def test_a_batch_gives_a_list_in_order_and_ids_by_index(server: ScriptedServer) -> None:
    sampling = [{"max_new_tokens": 1}, None, {"max_new_tokens": 2}]
    replies = generate(server, text=["a", "b", "c"], sampling_params=sampling, rid="r")
    assert [reply["meta_info"]["id"] for reply in replies] == ["r_0", "r_1", "r_2"]
    assert [reply["meta_info"]["completion_tokens"] for reply in replies][0::2] == [1, 2]
    assert replies[1]["text"] == ANSWER
    assert isinstance(generate(server, text=["a"]), list)


def test_n_outputs_of_a_batch_are_prompt_major(server: ScriptedServer) -> None:
    replies = generate(server, input_ids=[[5], [6, 7]], rid=["x", "y"], sampling_params={"n": 2})
    assert [reply["meta_info"]["id"] for reply in replies] == ["x_0", "x_1", "y_0", "y_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [1, 1, 2, 2]
    assert len(generate(server, text="a", sampling_params={"n": 3})) == 3


def test_a_stream_is_cumulative_by_default(server: ScriptedServer) -> None:
    seen = events(server, text="a")
    assert len(seen) > 3
    for before, after in pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert len(after["output_ids"]) > len(before["output_ids"])
    assert seen[-1]["text"] == ANSWER


def test_an_incremental_stream_is_disjoint(server: ScriptedServer) -> None:
    seen = events(server, text="a", incremental=True, return_logprob=True, logprob_start_len=0)
    assert "".join(event["text"] for event in seen) == ANSWER
    ids = [token for event in seen for token in event["output_ids"]]
    triples = [t for event in seen for t in event["meta_info"]["output_token_logprobs"]]
    assert [triple[1] for triple in triples] == ids
    assert "input_token_logprobs" in seen[0]["meta_info"]
    assert all("input_token_logprobs" not in event["meta_info"] for event in seen[1:])
    assert seen[-1]["meta_info"]["completion_tokens"] == len(ids)


def test_a_streamed_list_carries_the_index(server: ScriptedServer) -> None:
    last = {event["index"]: event["text"] for event in events(server, text=["a", "b"])}
    assert last == {0: ANSWER, 1: ANSWER}
    assert "index" not in events(server, text="a")[0]


def test_whole_answers_are_gathered_and_streams_are_not(server: ScriptedServer) -> None:
    generate(server, text="a", sampling_params={"stream_interval": 2})
    assert server.engine.requests[-1].sampling.stream_interval == 1 << 30
    events(server, text="a", sampling_params={"stream_interval": 2})
    assert server.engine.requests[-1].sampling.stream_interval == 2


def test_logprobs_are_asked_for_and_shown(server: ScriptedServer) -> None:
    reply = generate(
        server,
        input_ids=[5, 6, 7],
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[9],
        sampling_params={"max_new_tokens": 2},
    )
    info = reply["meta_info"]
    assert info["input_token_logprobs"] == [[logprob_of(6), 6, None], [logprob_of(7), 7, None]]
    first = reply["output_ids"][0]
    assert info["output_top_logprobs"][0] == [
        [logprob_of(first), first, None],
        [logprob_of(first) - 1, first + 1, None],
    ]
    assert info["output_token_ids_logprobs"] == [[[logprob_of(9), 9, None]]] * 2


def test_logprob_fields_reach_the_engine_only_with_return_logprob(server: ScriptedServer) -> None:
    generate(server, text="a", logprob_start_len=999, top_logprobs_num=5, token_ids_logprob=[1])
    sent = server.engine.requests[-1]
    assert (sent.return_logprobs, sent.logprob_start, sent.top_logprobs) == (False, -1, 0)
    assert sent.logprob_ids == ()


def test_logprob_fields_may_differ_in_a_batch(server: ScriptedServer) -> None:
    generate(
        server,
        text=["a", "b"],
        return_logprob=[True, None],
        top_logprobs_num=[3, 4],
        token_ids_logprob=[[1, 2], None],
    )
    one, two = server.engine.requests[-2:]
    assert (one.top_logprobs, one.logprob_ids) == (3, (1, 2))
    assert (two.top_logprobs, two.logprob_ids) == (0, ())


def test_explicit_nulls_are_nothing(server: ScriptedServer) -> None:
    nulls = {"lora_path": None, "image_data": None, "stream": None, "rid": None}
    assert generate(server, text="a", sampling_params=None, **nulls)["text"] == ANSWER
    assert refusal(server, text="a", lora_path="adapter")["param"] == "lora_path"


def test_an_empty_id_is_none(server: ScriptedServer) -> None:
    assert len(generate(server, text="a", rid="")["meta_info"]["id"]) == 32


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "text", "there is no prompt"),
        ({"text": "a", "input_ids": [5]}, "text", "exactly one"),
        ({"text": 7}, "text", "wrong type"),
        ({"text": []}, "text", "not a prompt"),
        ({"input_ids": ["a"]}, "input_ids", "text is no id"),
        ({"input_ids": [5, "a"]}, "input_ids", "text is no id"),
        ({"input_ids": [[5], []]}, "input_ids", "not a list of token ids"),
        ({"input_ids": []}, "input_ids", "not a list of token ids"),
        ({"input_ids": [True]}, "input_ids", "not a list of token ids"),
        ({"input_ids": [1024]}, "input_ids", "from 0 to 1023"),
        ({"input_ids": [-1]}, "input_ids", "from 0 to 1023"),
        ({"input_ids": [5] * 256}, "input_ids", "256 tokens, and at most 255"),
        ({"text": "0 1 2 " * 200}, "text", "at most 255"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "max_tokens", "max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p", "1"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "no batch"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "2 prompts"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "2 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "in use"),
        ({"text": "a", "token_ids_logprob": ["x"]}, "token_ids_logprob", "integers"),
        (
            {"text": "a", "return_logprob": True, "top_logprobs_num": -1},
            "top_logprobs_num",
            "from 0",
        ),
    ],
)
def test_a_wrong_request_names_the_field(
    server: ScriptedServer, body: dict[str, Any], param: str, says: str
) -> None:
    count = len(server.engine.requests)
    error = refusal(server, **body)
    assert error["param"] == param
    assert says in error["message"]
    assert len(server.engine.requests) == count  # nothing was sent


def test_no_content_type_is_needed(server: ScriptedServer) -> None:
    reply = server.http.post("/generate", content=b'{"text": "a"}')
    assert reply.json()["text"] == ANSWER
