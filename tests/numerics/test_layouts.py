# SPDX-License-Identifier: Apache-2.0
"""Scale layouts against FlashInfer's and SGLang's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import ShapeError
from tetrarch.numerics.layouts import (
    interleave_gate_up,
    mma_view,
    swizzle_128x4,
    unswizzle_128x4,
)

SHAPES = ["1x64", "130x80", "64x192", "256x256"]  # rows x K


@pytest.fixture(scope="module")
def layouts(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "layouts.safetensors")


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzling_equals_flashinfer_and_sglang(layouts: dict[str, Tensor], shape: str) -> None:
    assert torch.equal(swizzle_128x4(layouts[f"sf_linear_{shape}"]), layouts[f"sf_128x4_{shape}"])


@pytest.mark.parametrize("shape", SHAPES)
def test_unswizzling_undoes_swizzling(layouts: dict[str, Tensor], shape: str) -> None:
    linear = layouts[f"sf_linear_{shape}"]
    rows, columns = linear.shape
    assert torch.equal(unswizzle_128x4(swizzle_128x4(linear), rows=rows, columns=columns), linear)


def test_a_scale_lies_where_the_formula_says() -> None:
    linear = torch.randint(256, (300, 10), generator=torch.Generator().manual_seed(3)).byte()
    swizzled = swizzle_128x4(linear).flatten()
    for row in range(300):
        for column in range(10):
            tile = row // 128 * 3 + column // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert swizzled[offset] == linear[row, column]
    assert int(swizzled.count_nonzero()) == int(linear.count_nonzero())  # padding is zero


def test_each_expert_is_swizzled_by_itself(layouts: dict[str, Tensor]) -> None:
    linear = layouts["mma_in_linear_3x256x128"]
    swizzled = swizzle_128x4(linear)
    assert torch.equal(swizzled, layouts["mma_swizzled"])
    uneven = linear[:, :130, :5]
    alone = torch.stack([swizzle_128x4(expert) for expert in uneven])
    assert torch.equal(swizzle_128x4(uneven), alone)
    assert torch.equal(unswizzle_128x4(alone, rows=130, columns=5), uneven)


def test_the_dtype_of_the_scales_survives() -> None:
    scale = torch.rand(5, 3).to(torch.float8_e4m3fn)
    swizzled = swizzle_128x4(scale)
    assert swizzled.dtype == torch.float8_e4m3fn
    back = unswizzle_128x4(swizzled, rows=5, columns=3)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_the_mma_view_has_flashinfers_strides_and_no_bytes_of_its_own(
    layouts: dict[str, Tensor],
) -> None:
    swizzled = swizzle_128x4(layouts["mma_in_linear_3x256x128"])
    view = mma_view(swizzled)
    assert torch.equal(view, layouts["mma_6d_contiguous_copy"])
    assert list(view.stride()) == layouts["mma_6d_strides"].tolist()
    assert view.data_ptr() == swizzled.data_ptr()
    linear = layouts["mma_in_linear_3x256x128"]
    assert view[7, 2, 1, 3, 1, 2] == linear[2, 128 + 2 * 32 + 7, 4 + 3]


def test_interleaving_equals_sglang(layouts: dict[str, Tensor]) -> None:
    up, gate = layouts["w13_up_gate"].chunk(2, dim=1)
    gate_up = torch.cat((gate, up), dim=1)
    assert torch.equal(interleave_gate_up(gate_up), layouts["w13_interleaved64"])
    # Our order is gate before up; theirs, handed over as it is, comes out wrong.
    assert not torch.equal(interleave_gate_up(layouts["w13_up_gate"]), layouts["w13_interleaved64"])


def test_interleaving_equals_the_packed_weights_of_the_moe_reference(golden: Path) -> None:
    moe = load_file(golden / "moe.safetensors")
    up, gate = moe["w13_up_gate_packed"].chunk(2, dim=1)
    interleaved = interleave_gate_up(torch.cat((gate, up), dim=1))
    assert torch.equal(interleaved, moe["w13_interleaved64_packed"])


def test_smaller_chunks_alternate_sooner() -> None:
    rows = torch.arange(8).view(8, 1)  # gate 0..3, up 4..7
    assert interleave_gate_up(rows, chunk=2).flatten().tolist() == [4, 5, 0, 1, 6, 7, 2, 3]


def test_what_is_not_whole_tiles_or_chunks_is_refused() -> None:
    with pytest.raises(ShapeError, match="chunks of 64"):
        interleave_gate_up(torch.zeros(2, 192, 8))
    with pytest.raises(ShapeError, match="tiles"):
        mma_view(torch.zeros(1, 100, 4))
    with pytest.raises(ShapeError, match="130 x 4"):
        unswizzle_128x4(torch.zeros(128, 4), rows=130, columns=4)
