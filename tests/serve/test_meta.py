# SPDX-License-Identifier: Apache-2.0
"""`meta_info`, key by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.engine.acceptance import Acceptance
from tetrarch.engine.request import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    WeightSpan,
)
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.meta import LogprobLists, finish_object, meta_info
from tetrarch.serve.outputs import Output

if TYPE_CHECKING:
    from conftest import ScriptedServer

LENGTH = FinishReason(kind="length", length=3)


def output(server: ScriptedServer, start: int = -1, **delta: Any) -> Output:
    request = GenerateRequest(
        rid="r",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(),
        return_logprobs=True,
        logprob_start=start,
    )
    grown = Output(0, request, server.door.tokenizer)
    grown.push(Delta(rid="r", **delta))
    return grown


def test_a_running_output_has_counts_and_no_reason(server: ScriptedServer) -> None:
    info = meta_info(server.door, output(server, token_ids=(8, 9), num_cached=2))
    assert info == {
        "id": "r",
        "finish_reason": None,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 2,
        "reasoning_tokens": 0,
        "weight_version": "v7",
        "num_retractions": 0,
        "dp_rank": 0,
    }


def test_a_finished_output_says_how_its_drafts_have_gone(server: ScriptedServer) -> None:
    found = Acceptance(
        num_verifies=4, num_tokens=10, num_proposed=12, num_accepted=6, histogram=[1, 0, 3]
    )
    running = meta_info(server.door, output(server, token_ids=(8,), acceptance=found))
    assert not any(key.startswith("spec_") for key in running)
    info = meta_info(server.door, output(server, finish=LENGTH, acceptance=found))
    assert {key: value for key, value in info.items() if key.startswith("spec_")} == {
        "spec_accept_length": 2.5,
        "spec_accept_rate": 0.5,
        "spec_verify_ct": 4,
        "spec_num_correct_drafts": 6,
        "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [1, 0, 3],
    }


def test_a_finished_output_has_times(server: ScriptedServer) -> None:
    times = {"received": 1.0, "scheduled": 1.5, "first_token": 2.0, "finished": 4.0}
    info = meta_info(server.door, output(server, token_ids=(8, 9, 8), finish=LENGTH, times=times))
    assert info["finish_reason"] == {"type": "length", "length": 3}
    assert (info["queue_time"], info["first_token_latency"]) == (0.5, 1.0)
    assert info["decode_throughput"] == 1.0  # two tokens after the first, in two seconds
    assert 0 <= info["e2e_latency"] < 5


def test_one_token_has_no_decode_throughput(server: ScriptedServer) -> None:
    times = {"received": 1.0, "first_token": 2.0, "finished": 2.0}
    info = meta_info(server.door, output(server, token_ids=(8,), finish=LENGTH, times=times))
    assert "decode_throughput" not in info
    assert "queue_time" not in info


def test_the_version_is_that_of_the_last_token(server: ScriptedServer) -> None:
    spans = (WeightSpan("v1", 0, 1), WeightSpan("v2", 1, 2))
    info = meta_info(server.door, output(server, token_ids=(8, 9), versions=spans))
    assert info["weight_version"] == "v2"
    assert info["weight_versions"] == spans


@pytest.mark.parametrize(
    ("finish", "shown"),
    [
        (None, None),
        (FinishReason(kind="stop", matched=2), {"type": "stop", "matched": 2}),
        (FinishReason(kind="stop", matched="END"), {"type": "stop", "matched": "END"}),
        (LENGTH, {"type": "length", "length": 3}),
        (FinishReason(kind="abort"), {"type": "abort", "message": "aborted"}),
        (FinishReason(kind="abort", message="why"), {"type": "abort", "message": "why"}),
    ],
)
def test_reasons_have_their_own_keys(finish: FinishReason | None, shown: Any) -> None:
    assert finish_object(finish) == shown


def plain(_: int) -> None:
    return None


def lists(**asked: bool) -> LogprobLists:
    return LogprobLists(plain, **{"with_top": False, "with_picked": False, **asked})


def entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(
        token_id, -token_id / 8, top=((token_id, -token_id / 8), (1, -9.0)), picked=((4, -5.0),)
    )


def test_the_first_prompt_token_has_no_logprob(server: ScriptedServer) -> None:
    scored = output(server, start=0, prompt_logprobs=(entry(6), entry(7)))
    keys = lists(with_top=True, with_picked=True).of_prompt(scored)
    assert keys["input_token_logprobs"] == [(None, 5, None), (-0.75, 6, None), (-0.875, 7, None)]
    assert keys["input_top_logprobs"] == [
        None,
        [(-0.75, 6, None), (-9.0, 1, None)],
        [(-0.875, 7, None), (-9.0, 1, None)],
    ]
    assert keys["input_token_ids_logprobs"] == [None, [(-5.0, 4, None)], [(-5.0, 4, None)]]


def test_a_later_start_has_no_null(server: ScriptedServer) -> None:
    keys = lists().of_prompt(output(server, start=2, prompt_logprobs=(entry(7),)))
    assert keys == {"input_token_logprobs": [(-0.875, 7, None)]}
    assert lists().of_prompt(output(server, start=3)) == {"input_token_logprobs": []}
    assert lists().of_prompt(output(server, start=-1)) == {"input_token_logprobs": []}


def test_output_triples_may_carry_text() -> None:
    named = LogprobLists(lambda token_id: f"<{token_id}>", with_top=False, with_picked=False)
    keys = named.of_output([entry(8), entry(16)])
    assert keys == {
        "output_token_logprobs": [(-1.0, 8, "<8>"), (-2.0, 16, "<16>")],
        "output_token_logprobs_length": 2,
    }
