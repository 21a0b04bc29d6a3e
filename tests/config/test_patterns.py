# SPDX-License-Identifier: Apache-2.0
"""Three ways to name a layer."""

from __future__ import annotations

import pytest

from tetrarch.config.patterns import is_pattern, matches

LAYER = "model.layers.4.mlp.experts"


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.4",
        "layers.4",
        LAYER,
        "mlp.experts",
        "model.layers.4.*",
        "model.layers.[45]*",
        "*.experts",
        "re:.*layers\\.4",
        "re:model\\.layers\\.[0-9]+\\.mlp",
    ],
)
def test_the_layer_or_what_contains_it_is_named(pattern: str) -> None:
    assert matches(pattern, LAYER)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.40",
        "layers.4.mlp.gate",
        "shared_expert",
        "expert",
        "model.layers.4.mlp.experts.0.down_proj",
        "*.mlp.gate",
        "lm_head",
        "re:layers",
        "re:.*mlp.gate$",
    ],
)
def test_others_are_left_alone(pattern: str) -> None:
    assert not matches(pattern, LAYER)


def test_layer_4_is_not_layer_40() -> None:
    assert not matches("model.layers.4", "model.layers.40.mlp.experts")


def test_a_regular_expression_must_compile() -> None:
    assert is_pattern("re:a+")
    assert is_pattern("[")
    assert not is_pattern("re:(")
