# SPDX-License-Identifier: Apache-2.0
"""Compile the grouped GEMM for architectures: python compile_gemm.py 80,90 [FORM[/TOKENS] ...].

Prints a line for each kernel: architecture, form, tokens of its block, bytes of shared memory, of
the cubin, and whether a product that runs beside the program is waited for before the next
weights are decoded ("none": there is no such product).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from compile_only import compile_for
from tetrarch.kernels.grouped_gemm import triton as gemm
from tetrarch.kernels.grouped_gemm.tiles import BLOCK_TOKENS, max_blocks, tile_for
from tetrarch.kernels.permute.triton import Alignment

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS: dict[str, dict[str, Any]] = {
    "per-token-swiglu": {"activation": "swiglu"},
    "per-token-down": {"bias": True},
    "w4a16-clamped": {"activation": "swiglu", "bias": True, "limit": 7.0, "row_scale": False},
    "relu2-odd-width": {"activation": "relu2", "width": 80},
    "fused-finalize": {"adds": True},
    "plain": {"activation": "swiglu", "packed": False},
    "plain-fp32": {"packed": False, "dtype": FP32},
    "fp16": {"activation": "swiglu", "dtype": FP16},
    "without-ptx": {"activation": "swiglu", "ptx": False},
}
EXPERTS, ROWS, SLOTS, TOP_K = 2, 256, 64, 2


def launch(
    tokens: int,
    *,
    activation: str = "none",
    width: int = 256,
    dtype: torch.dtype = BF16,
    packed: bool = True,
    bias: bool = False,
    row_scale: bool = True,
    adds: bool = False,
    ptx: bool = True,
    limit: float = float("inf"),
) -> None:
    """Multiply once, in blocks of so many tokens."""
    blocks, k = max_blocks(SLOTS, EXPERTS, tokens), -(-width // 64) * 64
    order = Alignment(
        sorted_slots=torch.zeros(blocks * tokens, dtype=torch.int32),
        expert=torch.zeros(blocks, dtype=torch.int32),
        num_blocks=torch.zeros(1, dtype=torch.int32),
        owned=torch.zeros(SLOTS, dtype=torch.bool),
    )
    words = torch.zeros(EXPERTS, k // 64, ROWS, 16, dtype=torch.int16)
    scales = torch.zeros(EXPERTS, k // 64, ROWS, dtype=torch.int32)
    plain = torch.zeros(EXPERTS, ROWS, k, dtype=dtype)
    weight = gemm.Weight(
        words if packed else plain,
        scales if packed else None,
        torch.zeros(EXPERTS, 2 if activation == "swiglu" else 1) if packed else None,
        torch.zeros(EXPERTS, ROWS) if bias else None,
        ROWS,
    )
    columns = ROWS // 2 if activation == "swiglu" else ROWS
    out = torch.zeros(SLOTS // TOP_K, ROWS) if adds else torch.zeros(SLOTS, columns, dtype=dtype)
    topk_weights: Tensor | None = torch.zeros(SLOTS // TOP_K, TOP_K) if adds else None
    gemm.grouped_gemm(
        torch.zeros(SLOTS, width, dtype=dtype),
        weight,
        order=order,
        tile=tile_for(tokens, width, packed=packed, dtype=dtype, ptx=ptx),
        epilogue=gemm.Epilogue(
            out=out, activation=activation, limit=limit, topk_weights=topk_weights, round_to=dtype
        ),
        row_scale=torch.zeros(SLOTS) if row_scale and packed else None,
    )


# HGMMA is Hopper's, and Triton 3.6.0 disassembles not every later architecture.
HOPPER = 90


def waits(kernel: Any) -> str:
    """Whether the machine code awaits every run of HGMMA before it decodes on (HMUL2, HFMA2)."""
    found = re.findall(r"\b(HGMMA|WARPGROUP\.DEPBAR|HMUL2|HFMA2)\b", kernel.asm["sass"])
    if "HGMMA" not in found:
        return "none"
    running = False
    for name in found:
        if running and name.startswith(("HMUL2", "HFMA2")):
            return "no"
        running = name == "HGMMA" or (running and name != "WARPGROUP.DEPBAR")
    return "yes"


def main() -> None:
    for arch in map(int, sys.argv[1].split(",")):
        compiled = compile_for(arch)
        for form in sys.argv[2:] or FORMS:
            name, _, tokens = form.partition("/")
            most = 64 if FORMS[name].get("packed", True) else 128
            blocks = [block for block in BLOCK_TOKENS if block <= most]
            for block in (int(tokens),) if tokens else blocks:
                launch(block, **FORMS[name])
                _, kernel = compiled.pop()
                size = len(kernel.asm["cubin"])
                order = waits(kernel) if arch == HOPPER else "none"
                print(arch, name, block, kernel.metadata.shared, size, order)  # noqa: T201


if __name__ == "__main__":
    main()
