# SPDX-License-Identifier: Apache-2.0
"""Tokens, their bytes, and conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tetrarch.core.errors import CheckpointError, ConfigError, RequestError
from tetrarch.engine.text import Tokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "Hi"}]


def test_bytes_of_tokens_join_to_the_text(demo_tokenizer: Tokenizer) -> None:
    text = "Hello, 世界 🙂 e\u0301 <|im_end|>\n"
    ids = demo_tokenizer.encode(text)
    assert b"".join(demo_tokenizer.token_bytes(token) for token in ids) == (
        demo_tokenizer.decode(ids, skip_special_tokens=False).encode()
    )
    assert any("\ufffd" in demo_tokenizer.token_text(token) for token in ids)


def test_every_id_has_a_text_and_bytes(demo_tokenizer: Tokenizer) -> None:
    spelled = [demo_tokenizer.token_bytes(token) for token in range(demo_tokenizer.vocab_size)]
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert demo_tokenizer.token_bytes(demo_tokenizer.vocab_size + 3) == b""


def test_a_dropped_space_and_a_byte_token_are_shown_as_they_are(
    fallback_tokenizer: Tokenizer,
) -> None:
    assert fallback_tokenizer.token_text(2) == " world"
    assert fallback_tokenizer.token_bytes(2) == b" world"
    assert fallback_tokenizer.token_bytes(4 + 0xE4) == b"\xe4"


def test_a_conversation_is_what_transformers_makes_of_it(
    demo_tokenizer: Tokenizer, demo_path: Path
) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(demo_path)
    want = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert demo_tokenizer.encode_chat(CHAT) == want


def test_parts_are_joined_and_null_is_empty(demo_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = demo_tokenizer.encode_chat([{"role": "user", "content": parts}])
    assert joined == demo_tokenizer.encode_chat([{"role": "user", "content": "a\nb"}])


def test_the_last_message_is_left_open(demo_tokenizer: Tokenizer) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "The answer"}]
    ids = demo_tokenizer.encode_chat(chat, continue_final_message=True)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\nThe answer")


def test_a_template_file_replaces_the_models_own(demo_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}{{ mood }}")
    tokenizer = load_tokenizer(str(demo_path), chat_template=str(file))
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, template_args={"mood": "!"})) == "Hi!"
    with pytest.raises(ConfigError, match=r"no\.jinja"):
        load_tokenizer(str(demo_path), chat_template=str(tmp_path / "no.jinja"))


@pytest.mark.parametrize(
    ("messages", "args", "words"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": 5}], {}, "not text"),
        ([{"content": "x"}], {}, "role"),
        (CHAT, {"template_args": {"chat_template": "x"}}, "chat_template"),
        (CHAT, {"continue_final_message": True, "template_args": {"tokenize": True}}, "tokenize"),
    ],
)
def test_what_the_template_cannot_render_is_the_clients_error(
    demo_tokenizer: Tokenizer, messages: Any, args: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        demo_tokenizer.encode_chat(messages, **args)


def test_a_template_that_raises_is_the_clients_error(demo_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text("{{ raise_exception('roles must alternate') }}")
    tokenizer = load_tokenizer(str(demo_path), chat_template=str(file))
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.encode_chat(CHAT)


def test_a_template_that_is_none_is_refused_when_it_is_loaded(
    demo_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cut.jinja"
    file.write_text("{{ bos_token }}\n{% if messages %}")
    with pytest.raises(ConfigError, match=r"cut\.jinja is damaged(.|\n)*line 2"):
        load_tokenizer(str(demo_path), chat_template=str(file))
    file.write_text("{{ raise_exception('the system speaks first') }}")
    assert load_tokenizer(str(demo_path), chat_template=str(file)), "it may want other messages"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", {"model": None}, "ModelUntagged"),
        ("tokenizer.json", {"added_tokens": 5}, "TypeError"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "AttributeError"),
        ("tokenizer_config.json", {"chat_template": 5}, "its chat template is 5"),
        ("special_tokens_map.json", [1], "AttributeError"),
    ],
)
def test_whatever_transformers_stumbles_over_is_a_damaged_checkpoint(
    demo_path: Path, tmp_path: Path, file: str, content: Any, words: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path / name, tmp_path)
    if (tmp_path / file).exists():
        content = json.loads((tmp_path / file).read_text()) | content
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot load a tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert words in caught.value.why


def test_files_without_a_vocabulary_are_no_tokenizer(demo_path: Path, tmp_path: Path) -> None:
    """Without tokenizer.json transformers makes up an empty one for the model's type."""
    shutil.copy(demo_path / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="there is no vocabulary"):
        load_tokenizer(str(tmp_path))


def test_code_of_a_checkpoint_is_not_run(demo_path: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(CheckpointError, match="custom code"):
        load_tokenizer(str(tmp_path))


def test_a_model_without_template_says_so(fallback_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        fallback_tokenizer.encode_chat(CHAT)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))
