# SPDX-License-Identifier: Apache-2.0
"""tetrarch: serve mixture-of-experts language models whose experts are NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tetrarch.core.registry import Registry

if TYPE_CHECKING:
    from tetrarch.engine.request import SamplingParams
    from tetrarch.llm import LLM, Logprobs, Output

__all__ = ["LLM", "Logprobs", "Output", "SamplingParams"]

# Imported on use, so that `import tetrarch` and `tetrarch --help` need not wait for torch.
_EXPORTS = Registry(
    {
        "LLM": "tetrarch.llm:LLM",
        "Logprobs": "tetrarch.llm:Logprobs",
        "Output": "tetrarch.llm:Output",
        "SamplingParams": "tetrarch.engine.request:SamplingParams",
    }
)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return _EXPORTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
