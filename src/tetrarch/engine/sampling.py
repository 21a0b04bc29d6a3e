# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as a client sends them: read, checked, completed."""

from __future__ import annotations

from collections.abc import Mapping

from tetrarch.engine.request import SamplingParams

__all__ = ["check_sampling", "parse_sampling"]


def parse_sampling(raw: object, *, vocab_size: int) -> SamplingParams:
    """Read `/generate`'s `sampling_params` (a JSON object, or `None`).

    Raises:
        RequestError: An unknown key, a wrong type or a value out of bounds; `param` is the key.
    """
    raise NotImplementedError


def check_sampling(params: SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Check parameters that a program built, and complete them (`stop="x"` becomes `("x",)`).

    Raises:
        RequestError: As in `parse_sampling`.
    """
    raise NotImplementedError


_ = Mapping
