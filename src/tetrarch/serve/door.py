# SPDX-License-Identifier: Apache-2.0
"""What every endpoint of one server shares. Made once, handed to the handlers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tetrarch.config.plan import Plan
from tetrarch.core.errors import RequestError
from tetrarch.engine.request import GenerateRequest
from tetrarch.engine.text import Tokenizer
from tetrarch.engine.validation import check_request
from tetrarch.serve.client import EngineClient
from tetrarch.serve.fields import renamed
from tetrarch.serve.metrics import Metrics

__all__ = ["Door", "new_rid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One server.

    Attributes:
        created: Unix time of the start; constant, so that a model's card is.
        chat_defaults: Sampling parameters of chats that name none, under the engine's names.
    """

    plan: Plan
    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    chat_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def weight_version(self) -> str:
        """Version of the weights that a request sent now would see."""
        return self.client.load.weight_version

    @property
    def model_path(self) -> str:
        """Folder of the checkpoint that the weights came from last."""
        return self.client.load.model_path or self.plan.model.path

    def admit(self, request: GenerateRequest, names: Mapping[str, str]) -> GenerateRequest:
        """Return a request that the engine can serve, cut to fit if the operator allows that.

        Args:
            request: Not checked yet.
            names: What the client calls the fields that a refusal may name.

        Raises:
            EngineDead: There is no engine to ask for its limits.
            RequestError: It can never be served.
        """
        limits = self.client.limits()
        if self.plan.serve.allow_auto_truncate:
            room = limits.max_tokens - (request.sampling.max_new_tokens != 0)
            cut = request.prompt_ids[:room]
            request = msgspec.structs.replace(request, prompt_ids=cut)
        try:
            return check_request(request, limits)
        except RequestError as error:
            raise renamed(error, names) from error


def new_rid(prefix: str = "") -> str:
    """Return an id that no other request has."""
    return prefix + uuid.uuid4().hex
