# SPDX-License-Identifier: Apache-2.0
"""Faults are told together, counted, and by name."""

from __future__ import annotations

import pytest

from tetrarch.core.errors import CheckpointError
from tetrarch.models.faults import Fault, Faults


def test_nothing_wrong_raises_nothing() -> None:
    faults = Faults()
    faults.raise_any("here")
    faults.add(Fault.MISSING, "a")
    with pytest.raises(CheckpointError):
        faults.raise_any("here")


def test_every_kind_is_counted_and_the_first_ten_are_named() -> None:
    faults = Faults()
    for index in range(13):
        faults.add(Fault.MISSING, f"layer.{index}")
    faults.add(Fault.TWICE, "lm_head and its copy")
    with pytest.raises(CheckpointError) as caught:
        faults.raise_any("/models/x")
    error = caught.value
    assert error.what == "/models/x does not fit the model: 13 missing, 1 given twice"
    assert "layer.9; and 3 more" in error.why
    assert "layer.10" not in error.why
    assert "lm_head and its copy" in error.why
    assert "complete the download" in error.fix


@pytest.mark.parametrize("fault", Fault)
def test_every_kind_says_what_to_do(fault: Fault) -> None:
    faults = Faults()
    faults.add(fault, "x")
    with pytest.raises(CheckpointError) as caught:
        faults.raise_any("folder")
    assert caught.value.fix
