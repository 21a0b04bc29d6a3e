# SPDX-License-Identifier: Apache-2.0
"""A server whose steps overlap answers as one whose steps do not, and ends as cleanly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunningServer

LONG = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def overlapping(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    own = type(server)(tmp_path_factory.mktemp("overlap") / "log", "--overlap-schedule", "on")
    yield own
    own.end()


def question(left: int, **sampling: Any) -> dict[str, Any]:
    text = f"<|im_start|>user\nWhat is {left} + 30?<|im_end|>\n<|im_start|>assistant\n"
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40, **sampling}}


BODIES = [
    *(question(left) for left in range(12, 20)),
    question(40, temperature=0.7, sampling_seed=3, top_p=0.9),
    question(41, presence_penalty=0.5),
    question(42, stop=["= "]),
    question(43, min_new_tokens=30),
    {**question(44), "return_logprob": True, "logprob_start_len": 0},
]


def test_answers_are_those_of_steps_one_by_one(
    server: RunningServer, overlapping: RunningServer
) -> None:
    """All at once; each ends at a token, a string or a length while others go on."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        replies = list(pool.map(lambda body: overlapping.generate(**body), BODIES))
    for body, reply in zip(BODIES, replies, strict=True):
        want = server.generate(**body)
        assert reply["text"] == want["text"]
        assert reply["output_ids"] == want["output_ids"]
        assert reply["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
    info = overlapping.http.get("/server_info").json()
    assert info["disable_overlap_schedule"] is False


def test_a_flush_behind_an_answer_is_not_refused(overlapping: RunningServer) -> None:
    for left in range(12, 17):
        overlapping.generate(**question(left))
        assert overlapping.http.post("/flush_cache").status_code == 200


def test_pages_are_free_soon_after_a_client_has_gone(overlapping: RunningServer) -> None:
    body = {**question(12), "sampling_params": LONG, "stream": True}
    with overlapping.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    free = overlapping.wait_for(
        lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0, seconds=3
    )
    assert free < 1.0


def test_new_weights_come_between_two_steps(overlapping: RunningServer, demo_path: Any) -> None:
    """The same ones, so that an answer which goes on under them is known."""
    body = question(12, max_new_tokens=300, ignore_eos=True)
    want = overlapping.generate(**body)["output_ids"]
    for flush in (True, False):
        with ThreadPoolExecutor(1) as pool:
            going_on = pool.submit(overlapping.generate, **body)
            overlapping.wait_for(lambda load: load["num_running_reqs"] == 1, seconds=5)
            reply = overlapping.http.post(
                "/update_weights_from_disk",
                json={"model_path": str(demo_path), "flush_cache": flush},
            )
            assert reply.status_code == 200, reply.text
            assert reply.json()["num_paused_requests"] == 1
            assert going_on.result()["output_ids"] == want


def test_a_killed_engine_ends_the_stream(overlapping: RunningServer) -> None:
    """Last: it leaves no server behind."""
    body = {**question(12), "sampling_params": LONG, "stream": True}
    with overlapping.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        overlapping.engine.kill()
        said = [line for line in lines if line]
    assert "error" in said[-1] or "error" in said[-2]
