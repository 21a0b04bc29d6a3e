# SPDX-License-Identifier: Apache-2.0
"""The names of the support table and what fulfils them, imported on first use."""

from __future__ import annotations

from tetrarch.core.registry import Registry

__all__ = ["DISPATCHERS", "ENCODERS", "RUNNERS"]

RUNNERS = Registry(
    {
        "reference": "tetrarch.moe.runners.reference:ReferenceRunner",
        "triton": "tetrarch.moe.runners.triton:TritonRunner",
    }
)

DISPATCHERS = Registry({"all_gather": "tetrarch.moe.dispatch.all_gather:AllGather"})

# What quantizes weights while they load, by the type of the device where they are.
ENCODERS = Registry(
    {
        "cpu": "tetrarch.kernels.quantize.reference:encode_weights",
        "cuda": "tetrarch.kernels.quantize.triton:encode_weights",
    }
)
