# SPDX-License-Identifier: Apache-2.0
"""Counting tokens over HTTP gives the tokenizer's own numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tetrarch.engine.textless import Textless


def test_a_text_and_a_list_of_texts_are_tokenized(server: Any) -> None:
    ids = server.door.tokenizer.encode("What is 2 + 3?")
    one = server.http.post("/tokenize", json={"prompt": "What is 2 + 3?"}).json()
    assert one == {"tokens": ids, "count": len(ids), "max_model_len": 256}
    many = server.http.post("/tokenize", json={"prompt": ["What is 2 + 3?", ""]}).json()
    assert (many["tokens"], many["count"]) == ([ids, []], [len(ids), 0])


def test_ids_become_text_again(server: Any) -> None:
    ids = server.door.tokenizer.encode("héllo ☃ 42")
    reply = server.http.post("/detokenize", json={"tokens": ids}).json()
    assert reply == {"text": "héllo ☃ 42"}
    batch = server.http.post("/detokenize", json={"tokens": [ids, ids[:1]]}).json()
    assert batch["text"] == ["héllo ☃ 42", server.door.tokenizer.decode(ids[:1])]


@pytest.mark.parametrize("tokens", [[1024], [-1], "text", [[1], [5000]]])
def test_ids_that_are_none_are_refused(server: Any, tokens: object) -> None:
    reply = server.http.post("/detokenize", json={"tokens": tokens})
    assert reply.status_code == 400
    assert "tokens" in reply.text


def test_without_a_tokenizer_both_ways_are_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.door.tokenizer, "__class__", Textless)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [3]})):
        reply = server.http.post(path, json=body)
        assert reply.status_code == 400
        assert "no tokenizer" in reply.text
