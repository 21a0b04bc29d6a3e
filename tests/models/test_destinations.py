# SPDX-License-Identifier: Apache-2.0
"""A tensor of several matrices falls apart into what an expert stager takes."""

from __future__ import annotations

import pytest
import torch

from tetrarch.models.destinations import ExpertDestination
from tetrarch.moe.types import Part

GATE, UP = torch.arange(6.0).view(2, 3), 10 + torch.arange(6.0).view(2, 3)


def test_one_matrix_is_itself() -> None:
    to = ExpertDestination(layer="a", part=Part.UP, expert=5)
    [(part, expert, value)] = to.matrices(UP)
    assert (part, expert, to.fused) == (Part.UP, 5, False)
    assert torch.equal(value, UP)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_of_gates_and_ups(interleaved: bool, transposed: bool) -> None:
    joined = torch.stack((GATE, UP), 1).flatten(0, 1) if interleaved else torch.cat((GATE, UP))
    stack = torch.stack((joined, -joined))
    to = ExpertDestination(
        layer="a", part=None, expert=None, transposed=transposed, interleaved=interleaved
    )
    found = {(p, e): m for p, e, m in to.matrices(stack.mT if transposed else stack)}
    assert to.fused
    assert found.keys() == {(part, e) for part in (Part.GATE, Part.UP) for e in (0, 1)}
    for expert, sign in ((0, 1), (1, -1)):
        assert torch.equal(found[Part.GATE, expert], sign * GATE)
        assert torch.equal(found[Part.UP, expert], sign * UP)


def test_a_bias_is_never_transposed() -> None:
    to = ExpertDestination(layer="a", part=Part.DOWN, expert=None, bias=True, transposed=True)
    found = list(to.matrices(GATE))
    assert [(part, expert) for part, expert, _ in found] == [(Part.DOWN, 0), (Part.DOWN, 1)]
    assert torch.equal(found[1][2], GATE[1])
