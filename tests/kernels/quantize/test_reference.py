# SPDX-License-Identifier: Apache-2.0
"""The quantize operation is the format's own definition, under a kernel's signature."""

from __future__ import annotations

import torch

from tetrarch.kernels.quantize.reference import quantize_per_tensor, quantize_per_token
from tetrarch.numerics.nvfp4 import decode, encode, encode_per_token

ROWS = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_per_token_is_the_definition() -> None:
    for mine, defined in zip(quantize_per_token(ROWS), encode_per_token(ROWS), strict=True):
        assert torch.equal(mine.view(torch.uint8), defined.view(torch.uint8))


def test_per_tensor_takes_a_scale_that_decodes() -> None:
    """An input scale s decodes: the values come back as code * block_scale * s."""
    input_scale = ROWS.float().abs().max() / 2688
    codes, block_scale = quantize_per_tensor(ROWS, input_scale=input_scale)
    defined = encode(ROWS, encode_scale=1 / input_scale)
    assert torch.equal(codes, defined[0])
    back = decode(codes, block_scale, global_scale=input_scale)
    assert (back - ROWS.float()).abs().max() <= ROWS.float().abs().max() / 6 + 1e-6
