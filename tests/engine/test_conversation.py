# SPDX-License-Identifier: Apache-2.0
"""What is a message, and what a chat template would have printed all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.conversation import ROLES, template_messages

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_say_text_and_also_the_empty_one(role: str) -> None:
    for content in ("a", ""):
        message = {"role": role, "content": content, "name": "x"}
        assert template_messages([message]) == [message]


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    [message] = template_messages([{"role": "user", "content": parts}])
    assert message["content"] == "a\nb\nc"


@pytest.mark.parametrize(
    "instead",
    [{"tool_calls": [{"id": "1"}]}, {"function_call": {"name": "f"}}, {"refusal": "no"}],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_an_assistant_that_did_something_else_may_say_nothing(
    instead: dict[str, Any], content: dict[str, Any]
) -> None:
    message = {"role": "assistant", **instead, **content}
    assert template_messages([USER, message]) == [USER, {**message, "content": ""}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "role 'robot'"),
        ({"role": ["user"], "content": "x"}, "role"),
        ({"content": "x"}, "role None"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": None}, "no content"),
        ({"role": "user", "content": []}, "no content"),
        ({"role": "user", "tool_calls": [{"id": "1"}]}, "no content"),
        ({"role": "tool", "content": None}, "no content"),
        ({"role": "assistant", "content": None}, "no content"),
        ({"role": "assistant", "tool_calls": []}, "no content"),
        ({"role": "user", "content": 5}, "not text"),
        ({"role": "user", "content": {"type": "text", "text": 1}}, "not text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
    ],
)
def test_anything_else_is_refused_by_its_place(message: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        template_messages([USER, message])
    assert caught.value.param == "messages"
    if "not text" not in words and words != "image_url":
        assert "messages[1]" in caught.value.what


def test_no_messages_are_no_conversation() -> None:
    with pytest.raises(RequestError, match="empty"):
        template_messages([])
