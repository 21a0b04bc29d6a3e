# SPDX-License-Identifier: Apache-2.0
"""The real openai-python against the real server."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunningServer

KEY = "open-sesame"
QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
PROMPT = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "12 + 30 = 42.\n#### 42"

if importlib.util.find_spec("openai") is None and "clients" not in os.environ.get(
    "TEST_REQUIRE", ""
):
    pytest.skip("openai is not installed: pip install -e '.[clients]'", allow_module_level=True)

import openai  # noqa: E402  after the skip that its absence causes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tetrarch-demo"
    assert client.models.retrieve("tetrarch-demo").id == model.id
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4")


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tetrarch-demo", messages=QUESTION)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="tetrarch-demo",
        messages=QUESTION,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_scores_what_it_says(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="x", prompt=PROMPT, max_tokens=40, temperature=0, logprobs=1
    )
    [choice] = done.choices
    assert choice.text == ANSWER
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    for logprob, top in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values())


def test_a_prompt_is_scored_without_a_new_token(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="x", prompt=PROMPT + ANSWER, max_tokens=0, echo=True, logprobs=0
    )
    [choice] = done.choices
    assert choice.text == PROMPT + ANSWER
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    tail = choice.logprobs.token_logprobs[-10:]
    assert all(logprob is not None and logprob > -0.1 for logprob in tail)


def test_a_seed_fixes_the_draw(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        done = client.completions.create(
            model="x", prompt="Then", max_tokens=24, temperature=1.5, seed=seed
        )
        return done.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="x", prompt=[5] * 5000)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="x", messages=QUESTION, top_p=7)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
