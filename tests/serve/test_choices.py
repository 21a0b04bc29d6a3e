# SPDX-License-Identifier: Apache-2.0
"""Whoever sends a value that is none is told the values that there are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from tetrarch.serve.choices import choices_at
from tetrarch.serve.control import PauseBody
from tetrarch.serve.groups import DistributedBody, InitGroupBody
from tetrarch.serve.inspection import CheckBody
from tetrarch.serve.weights import BeginBody, DiskBody, TensorBody


class Inner(msgspec.Struct):
    mode: Literal["a", "b"] | None = None
    words: list[Literal["x"]] = []


class Outer(msgspec.Struct):
    inner: Inner | None = None
    many: list[Inner] = []
    number: Annotated[Literal[1, 2, 3] | None, msgspec.Meta(description="One of them.")] = None
    text: str | None = None


@pytest.mark.parametrize(
    ("value", "choices"),
    [
        ({"number": 4}, "1, 2 or 3"),
        ({"number": "1"}, "1, 2 or 3"),
        ({"inner": {"mode": "c"}}, '"a" or "b"'),
        ({"inner": {"words": ["x", "y"]}}, '"x"'),
        ({"many": [{"mode": 1}]}, '"a" or "b"'),
        ({"text": 1}, ""),
        ({"inner": 1}, ""),
        (7, ""),
    ],
)
def test_the_values_of_the_place_at_fault_are_told(value: Any, choices: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Outer)
    assert choices_at(Outer, str(caught.value)) == choices


@pytest.mark.parametrize(
    ("body", "field", "choice"),
    [
        (PauseBody, "mode", "in_place"),
        (CheckBody, "action", "reset_tensors"),
        (CheckBody, "selector", "draft"),
        (DiskBody, "load_format", "safetensors"),
        (TensorBody, "selector", "draft"),
        (BeginBody, "selector", "draft"),
        (InitGroupBody, "backend", "gloo"),
        (DistributedBody, "load_format", "flattened_bucket"),
    ],
)
def test_every_control_field_with_a_few_values_tells_them(
    body: type, field: str, choice: str
) -> None:
    assert f'"{choice}"' in choices_at(body, f"Invalid enum value 'x' - at `$.{field}`")
