# SPDX-License-Identifier: Apache-2.0
"""What crosses the border arrives as it left."""

from __future__ import annotations

import msgspec
import pytest

from tetrarch.core import errors
from tetrarch.core.errors import CheckpointError, LaunchErrors, RequestError, TetrarchError
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Flush,
    Heartbeat,
    Inbound,
    LoadProgress,
    Outbound,
    Ready,
    Shutdown,
    Snapshot,
    StartFailed,
    decode_inbound,
    decode_outbound,
    encode,
)
from tetrarch.engine.request import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    WeightSpan,
)
from tetrarch.executor.step import TokenLogprob

INBOUND: list[Inbound] = [
    GenerateRequest(
        rid="r",
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(stop=("é🙂",), logit_bias={7: -1.5}, sampling_seed=-(2**63)),
        logprob_ids=(4,),
    ),
    Abort(rid="r", prefix=True, quiet=True, ticket=3),
    Flush(ticket=1, timeout=2.5),
    Snapshot(ticket=2),
    Shutdown(),
]
OUTBOUND: list[Outbound] = [
    Delta(
        rid="r",
        token_ids=(1, 2),
        logprobs=(TokenLogprob(1, -0.5, ((1, -0.5),), ((9, -3.0),)),),
        finish=FinishReason(kind="stop", matched="x"),
        versions=(WeightSpan("default", 0, 2),),
        times={"received": 1.25},
    ),
    Delta(rid="s", finish=FinishReason(kind="stop", matched=2)),
    ControlReply(ticket=1, ok=True, payload={"aborted": 2}),
    Ready(payload={"memory": {"weights": 5}}),
    LoadProgress(label="loading", total=9, unit="bytes", done=3),
    StartFailed(kind="CheckpointError", what="a", why="b", fix="c"),
    Heartbeat(
        num_running=1,
        num_waiting=2,
        num_used_tokens=3,
        num_cached_tokens=4,
        max_total_tokens=5,
        counters={"steps": 6.0},
    ),
]


@pytest.mark.parametrize("message", INBOUND, ids=lambda message: type(message).__name__)
def test_inbound_messages_arrive_as_they_left(message: Inbound) -> None:
    assert decode_inbound(encode(message)) == message


def test_outbound_batches_arrive_as_they_left() -> None:
    assert decode_outbound(encode(OUTBOUND)) == OUTBOUND


def test_wrong_types_are_refused() -> None:
    wrong = msgspec.msgpack.encode({"type": "GenerateRequest", "rid": 5})
    with pytest.raises(msgspec.ValidationError):
        decode_inbound(wrong)


@pytest.mark.parametrize("name", errors.__all__)
def test_a_start_error_keeps_its_class_and_its_three_lines(name: str) -> None:
    kind = vars(errors)[name]
    error = (
        LaunchErrors([CheckpointError("a", why="b", fix="c")])
        if kind is LaunchErrors
        else (kind("a", why="b", fix="c"))
    )
    back = StartFailed.of(error).error()
    assert type(back) is (TetrarchError if kind is LaunchErrors else kind)
    assert (back.what, back.why, back.fix) == (error.what, error.why, error.fix)
    assert isinstance(back, RequestError) == (name == "RequestError")
