# SPDX-License-Identifier: Apache-2.0
"""The names of the support table and the classes that fulfil them, imported on first use."""

from __future__ import annotations

from tetrarch.core.registry import Registry

__all__ = ["DISPATCHERS", "RUNNERS"]

RUNNERS = Registry(
    {
        "reference": "tetrarch.moe.runners.reference:ReferenceRunner",
        "triton": "tetrarch.moe.runners.triton:TritonRunner",
    }
)

DISPATCHERS = Registry({"all_gather": "tetrarch.moe.dispatch.all_gather:AllGather"})
