# SPDX-License-Identifier: Apache-2.0
"""Small models compute a few rows without oneDNN, and leave the switch as they found it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tetrarch.models.onednn import FEW_ROWS, FewRows, is_small, without_onednn


def test_one_large_layer_makes_a_model_large() -> None:
    small = nn.Sequential(nn.Linear(64, 64), nn.Linear(1024, 1023))
    assert is_small(small)
    assert not is_small(nn.Sequential(*small, nn.Linear(1024, 1024)))


@pytest.mark.parametrize("num_rows", range(1, FEW_ROWS + 1))
def test_a_row_is_the_same_up_to_rounding(num_rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 256).bfloat16()
    row = torch.randn(num_rows, 256).bfloat16()
    with torch.no_grad(), without_onednn():
        alone = layer(row)
    exact = row.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(alone.double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_what_many_are_up_to_rounding(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    product = FewRows()
    for wide, narrow in ((256, 64), (512, 256), (64, 128)):  # the room grows, and is used again
        layer = nn.Linear(narrow, wide, bias=bias).to(dtype)
        for num_rows in (1, 2, FEW_ROWS, FEW_ROWS + 1):
            rows = torch.randn(1, num_rows, narrow).to(dtype)
            with torch.no_grad():
                found = product(rows, layer.weight, layer.bias)
                expected = layer(rows)
            assert (found.dtype, found.shape) == (dtype, (1, num_rows, wide))
            torch.testing.assert_close(found, expected)


def test_the_switch_comes_back_after_an_error() -> None:
    def fail() -> None:
        with without_onednn():
            assert not torch.backends.mkldnn.enabled
            raise ZeroDivisionError

    before = torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.backends.mkldnn.enabled == before
