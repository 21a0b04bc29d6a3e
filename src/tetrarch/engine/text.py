# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: the only file of the engine that knows transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tetrarch.config.files import TOKENIZER_CONFIG, is_file
from tetrarch.core.errors import CheckpointError, ConfigError, RequestError
from tetrarch.engine.conversation import template_messages

__all__ = ["Tokenizer", "load_tokenizer"]

_INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character (yet)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What a template raises over messages that it cannot render.
_UNRENDERED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_TEMPLATE_WORDS = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a local checkpoint.

    Args:
        path: The folder.
        chat_template: A Jinja file that replaces the checkpoint's own template.

    Raises:
        CheckpointError: The folder holds no tokenizer, or a damaged one.
        ConfigError: The template file cannot be read, or is no template.
    """
    if not is_file(Path(path) / TOKENIZER_CONFIG):
        raise _no_tokenizer(path, f"it has no {TOKENIZER_CONFIG}: end tokens would be a guess")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # what a file makes them stumble over; `tokenizers` raises just this
        what = " ".join(str(error).split())
        raise _no_tokenizer(path, f"{type(error).__name__}: {what:.300}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise _no_tokenizer(path, "there is no vocabulary")
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise _no_tokenizer(path, f"its chat template is {tokenizer.chat_template!r:.60}")
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    _check_template(tokenizer, chat_template or path)
    return Tokenizer(tokenizer)


def _no_tokenizer(path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot load a tokenizer from {path}",
        why=why,
        fix=f"add tokenizer.json and {TOKENIZER_CONFIG} to the folder, or download them again, or "
        "name another one with --tokenizer-path",
    )


def _check_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a template that no conversation could be rendered with."""
    if tokenizer.chat_template is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of {where} is damaged",
            why=f"line {error.lineno}: {error.message}",
            fix="correct it, or give --chat-template another file",
        ) from error
    except _UNRENDERED:
        return  # it may well want other messages than this one


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the chat template {path}",
            why=str(error),
            fix="give --chat-template the path of a Jinja file",
        ) from error


class Tokenizer:
    """Text to ids and back."""

    has_text = True  # a server may do without (`engine.textless`)

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._hf: Any = tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids that have a text; the model's vocabulary is often padded beyond."""
        return len(self._hf)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end token that the tokenizer names, if any."""
        return frozenset(() if self._hf.eos_token_id is None else (self._hf.eos_token_id,))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Raises:
            RequestError: It holds half a surrogate pair, which is no character.
        """
        try:
            return self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                "the text is not valid Unicode",
                why="it holds half a surrogate pair, which no tokenizer can read",
                fix="send the text as UTF-8",
                param="text",
            ) from error

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of ids, without tidying spaces."""
        return self._hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,  # would change text that was already streamed
        )

    def token_text(self, token_id: int) -> str:
        """Return one token as a person would read it; U+FFFD for part of a character."""
        text = self.decode((token_id,), skip_special_tokens=False)
        dropped_space = self._piece(token_id).startswith("\u2581") and not text.startswith(" ")
        return f" {text}" if dropped_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, also when they are part of a character."""
        text = self.token_text(token_id)
        if _INCOMPLETE not in text:
            return text.encode()
        piece = self._piece(token_id)
        if (match := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(match[1])
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return text.encode()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render a conversation with the chat template and return its ids.

        Args:
            messages: `role` and `content` each; content parts are joined by line breaks.
            tools: Function descriptions, for templates that show them.
            add_generation_prompt: End with the words that open the assistant's turn.
            continue_final_message: Leave the last message open instead.
            template_args: Further variables of the template.

        Raises:
            RequestError: No template, or it refuses these messages, or they are none.
        """
        if self._hf.chat_template is None:
            raise RequestError(
                "this model has no chat template",
                why="its tokenizer defines none, so messages have no agreed form",
                fix="use /v1/completions, or start the server with --chat-template FILE",
                param="messages",
            )
        args, chat = _template_args(template_args), template_messages(messages)
        try:
            text = self._hf.apply_chat_template(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **args,
            )
        except _UNRENDERED as error:
            raise RequestError(
                "the chat template refuses these messages",
                why=str(error),
                fix="check the roles, their order, and that every message has content",
                param="messages",
            ) from error
        return self.encode(text, add_special_tokens=False)

    def _piece(self, token_id: int) -> str:
        """Return a token's own spelling; empty for an id that only pads the vocabulary."""
        return cast("str | None", self._hf.convert_ids_to_tokens(token_id)) or ""


def _template_args(args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    taken = _TEMPLATE_WORDS.intersection(args or {})
    if taken:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}",
            why="these arguments belong to the server",
            fix="leave them out",
            param="chat_template_kwargs",
        )
    return args or {}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE vocabularies (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the others for code points from 256 up.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + rank): byte for rank, byte in enumerate(hidden)
    }


_BYTE_OF = _byte_alphabet()
