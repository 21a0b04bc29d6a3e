# SPDX-License-Identifier: Apache-2.0
"""Weights are looked at by name and by checksum, over a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tetrarch.engine.actions import (
    CheckWeights,
    GetWeights,
    UpdateFromDisk,
)


@pytest.fixture
def desk(model_desk: Any) -> Any:
    """Over a real model, A."""
    return model_desk


def test_checks_compare_weights_and_noise_needs_a_full_update(
    desk: Any, checkpoints: tuple[Path, Path, Path], checksums: Any
) -> None:
    reply = desk.ask(CheckWeights, action="compare")
    assert (reply.ok, reply.status) == (False, 400)
    assert desk.ask(CheckWeights, action="snapshot").payload["checksum"] == checksums[0]
    assert desk.ask(CheckWeights, action="compare").ok
    assert desk.ask(CheckWeights, action="reset_tensors").ok
    assert desk.beat.state == "weights_inconsistent"
    reply = desk.ask(CheckWeights, action="compare")
    assert (reply.ok, reply.status, reply.code) == (False, 400, "weights_differ")
    assert "model.norm.weight" in reply.payload["differing"]
    skip = tuple(reply.payload["differing"])
    assert desk.ask(CheckWeights, action="compare", skip=skip).ok
    assert desk.ask(UpdateFromDisk, path=str(checkpoints[0])).ok
    assert desk.ask(CheckWeights, action="compare").ok
    assert desk.ask(CheckWeights, action="checksum").payload["checksum"] == checksums[0]


def test_weights_are_read_by_name(desk: Any, checkpoints: tuple[Path, Path, Path]) -> None:
    stored = load_file(checkpoints[0] / "model.safetensors")["lm_head.weight"]
    reply = desk.ask(GetWeights, name="lm_head.weight", truncate_size=3)
    assert reply.payload["values"] == stored[:3].tolist()
    reply = desk.ask(GetWeights, name="nobody")
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_request")
