# SPDX-License-Identifier: Apache-2.0
"""Where kernels are tested: in Triton's interpreter on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import os

import pytest
import torch

from interpreter import repair

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton decorates a kernel


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device whose Triton runs the test; the GPU's rows are marked `gpu`."""
    pytest.importorskip("triton", reason="pip install tetrarch[test-kernels]")
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in a process that sees a GPU")
    repair()
    return torch.device("cpu")
