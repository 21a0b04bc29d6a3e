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
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}

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
    whole = client.chat.completions.create(model="any-name", messages=QUESTION)
    assert (whole.object, whole.model) == ("chat.completion", "any-name")
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
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, end = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(piece.delta.content or "" for piece in middle) == ANSWER
    assert (end.delta.content, end.finish_reason) == (None, "stop")
    assert all(piece.finish_reason is None for piece in (first, *middle))
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_usage_streams_only_when_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="x", messages=QUESTION, stream=True)
    chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    counted = client.completions.create(
        model="x",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    *pieces, last = list(counted)
    totals = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(totals) == len(pieces)
    assert totals == sorted(totals)
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], totals[-1])


def test_chat_logprobs_are_typed_and_spell_the_answer(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="x", messages=QUESTION, logprobs=True, top_logprobs=3, max_completion_tokens=6
    )
    [choice] = done.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    spelt = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert spelt.decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)


def test_prompts_times_outputs_are_indexed_prompt_major(client: openai.OpenAI) -> None:
    prompts = [PROMPT.replace("30", str(number)) for number in (30, 45)]
    done = client.completions.create(
        model="x", prompt=prompts, n=2, best_of=2, max_tokens=40, temperature=0
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    sums = [choice.text.splitlines()[-1] for choice in done.choices]
    assert sums == ["#### 42", "#### 42", "#### 57", "#### 57"]
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    one = client.completions.create(
        model="x", prompt=prompts[0], best_of=1, max_tokens=40, temperature=0
    )
    assert one.usage is not None
    assert done.usage.completion_tokens == 4 * one.usage.completion_tokens


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="x", prompt=PROMPT, max_tokens=40, temperature=0, stop=[" =", "nothing"]
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("12 + 30", "stop")


def test_a_batch_of_ids_is_scored_as_lm_eval_does(
    client: openai.OpenAI, server: RunningServer
) -> None:
    """Greedy, one token after the echoed prompt; top-1 must be the chosen float itself."""
    texts = [PROMPT + ANSWER[:10], PROMPT + ANSWER[:4]]
    ids = server.http.post("/tokenize", json={"prompt": texts}).json()["tokens"]
    done = client.completions.create(
        model="x", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    for choice, prompt in zip(done.choices, ids, strict=True):
        scores = choice.logprobs
        assert scores is not None
        assert scores.token_logprobs is not None
        assert scores.top_logprobs is not None
        assert scores.text_offset is not None
        assert len(scores.token_logprobs) == len(scores.top_logprobs) == len(prompt) + 1
        assert len(scores.text_offset) == len(prompt) + 1
        assert scores.token_logprobs[0] is None
        assert scores.top_logprobs[0] is None
        assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values())
        # The demo model is sure of the digits that it would have written itself.
        assert scores.token_logprobs[-2] == max(scores.top_logprobs[-2].values())
        # An unlikely token of the question is no top-1: the comparison above can fail.
        assert any(
            value < max(top.values())
            for value, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
        )
        assert scores.text_offset == sorted(scores.text_offset)


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
    assert choice.logprobs.top_logprobs is not None
    assert not any(choice.logprobs.top_logprobs)
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[at : at + len(token)] == token


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
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="x", prompt=[5] * 5000, stream=True)
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        client.chat.completions.create(model="x", messages=QUESTION, tools=[TOOL])
    assert (caught.value.param, caught.value.type) == ("tools", "Bad Request")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="x", prompt="a", extra_body={"temperature": "warm"})
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="x", prompt=[[999_999]])
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="x", messages=QUESTION, top_p=7)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
