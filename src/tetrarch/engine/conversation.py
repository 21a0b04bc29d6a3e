# SPDX-License-Identifier: Apache-2.0
"""The messages of a conversation: checked, and brought into the form that chat templates take.

Most templates print whatever role they are given, and an empty string where content is missing:
a mistake would change the prompt in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tetrarch.core.errors import RequestError

__all__ = ["ROLES", "template_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What an assistant may have said instead of content.
_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "refusal")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is one string; parts are joined by line breaks.

    Raises:
        RequestError: There are none, or one has no known role, no content, or content that is not
            text; `param` is `messages`.
    """
    if not messages:
        raise _refusal("messages is empty", "there is nothing to answer", "send a message")
    return [
        {**message, "content": _content(message, f"messages[{index}]")}
        for index, message in enumerate(messages)
    ]


def _content(message: Mapping[str, Any], name: str) -> str:
    role: object = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise _refusal(
            f"{name} has the role {role!r:.60}", f"roles are {known}", "send one of them"
        )
    content: object = message.get("content")
    if content is None or content == []:
        if role == "function" or (role == "assistant" and any(map(message.get, _INSTEAD))):
            return ""
        raise _refusal(
            f"{name} has no content",
            "only an assistant that called a tool may say nothing",
            "send a string, or a list of text parts",
        )
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    return "\n".join(_text(part) for part in parts)


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
    text = fields.get("text")
    if fields.get("type") != "text" or not isinstance(text, str):
        raise _refusal(
            "a content part is not text",
            f"its type is {fields.get('type')!r}, and this model reads text only",
            'send a string, or parts of the form {"type": "text", "text": "..."}',
        )
    return text


def _refusal(what: str, why: str, fix: str) -> RequestError:
    return RequestError(what, why=why, fix=fix, param="messages")
