# SPDX-License-Identifier: Apache-2.0
"""Text to tokens, tokens back to text: the only file of the engine that knows transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tetrarch.engine.request import FinishReason, SamplingParams

__all__ = ["OutputText", "StopMatcher", "TextStream", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a local checkpoint; `chat_template` is a file that replaces its own.

    Raises:
        CheckpointError: There is no tokenizer.  ConfigError: The template file is unreadable.
    """
    raise NotImplementedError


class Tokenizer:
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows (the model's may be more)."""
        raise NotImplementedError

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens the tokenizer names."""
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        raise NotImplementedError

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of ids."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Return one token as a person would read it; '\ufffd' where it is part of a character."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes a token stands for, also when they are part of a character."""
        raise NotImplementedError

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

        Raises:
            RequestError: No template, or the template refuses these messages.
        """
        raise NotImplementedError


class TextStream:
    """Text of a growing list of tokens; never splits a character."""

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None: ...

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens, return the text that is now certain."""
        raise NotImplementedError

    def flush(self) -> str:
        """Return what was held back."""
        raise NotImplementedError


class StopMatcher:
    """Find the first stop string in growing text; hold back what may become one."""

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take new text, return what may be shown."""
        raise NotImplementedError

    def flush(self) -> str:
        """Return what was held back."""
        raise NotImplementedError


class OutputText:
    """What a client may see of an output: `TextStream`, then `StopMatcher`, then trimming.

    The engine uses it to find stop strings, the doors to make text; both see the same.

        text = OutputText(tokenizer, request.sampling, request.prompt_ids)
        shown = text.push(delta.token_ids, delta.finish)   # "" while nothing is certain
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take a delta, return the new text; with `finish` everything held back comes out."""
        raise NotImplementedError
