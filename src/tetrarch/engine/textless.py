# SPDX-License-Identifier: Apache-2.0
"""What stands for a tokenizer where there is none: ids in, ids out, and no text."""
# It has a tokenizer's methods, and needs none of their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tetrarch.config.plan import Plan
from tetrarch.core.errors import RequestError
from tetrarch.engine.text import Tokenizer, load_tokenizer

__all__ = ["Textless", "tokenizer_of"]


def tokenizer_of(plan: Plan) -> Tokenizer:
    """Return what a plan reads and writes text with.

    Raises:
        CheckpointError: Its folder holds no tokenizer, or a damaged one.
        ConfigError: The chat template cannot be read, or is no template.
    """
    if plan.model.tokenizer_path is None:
        return Textless()
    return load_tokenizer(plan.model.tokenizer_path, chat_template=plan.serve.chat_template)


class Textless(Tokenizer):
    """Refuses text, and gives ids none."""

    has_text = False

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def vocab_size(self) -> int:
        """No id has a text."""
        return 0

    @property
    def eos_ids(self) -> frozenset[int]:
        """The configuration's are all."""
        return frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Refuse.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "this server has no tokenizer",
            why="it was started without one, and serves token ids only",
            fix="send the prompt as token ids: input_ids of /generate, prompt of /v1/completions",
            param="text",
        )

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return no text."""
        return ""

    def token_text(self, token_id: int) -> str:
        """Return no text."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return no text."""
        return b""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Refuse, as `encode` does."""
        return self.encode("")
