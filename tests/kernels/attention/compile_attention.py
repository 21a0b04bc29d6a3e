# SPDX-License-Identifier: Apache-2.0
"""Compile every attention kernel for one architecture: python compile_attention.py 90 [FORM ...].

Prints a line for each kernel: form, name, bytes of shared memory, bytes of the cubin.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from compile_only import SHARED_BYTES, compile_for
from tetrarch.kernels.attention import triton as paged
from tetrarch.kernels.attention.reference import ScoreRule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# dims of keys and values, query heads, heads of keys, and what is unusual
FORMS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "windowed": (64, 64, 64, 8, {"window": 128, "sinks": True, "short_q_len": 4}),
    "plain": (128, 128, 32, 4, {"page": 64}),
    "small-pages": (128, 128, 32, 4, {"exact_prompts": True}),
    "latent": (512, 64, 128, 1, {"latent": True, "page": 64}),
    "latent-small-pages": (512, 64, 16, 1, {"latent": True, "exact_prompts": True}),
    "dim-80": (80, 80, 16, 16, {"page": 256}),
    "three-heads": (80, 80, 3, 3, {}),
    "dim-96": (96, 96, 12, 4, {"window": 4096}),
    "dim-192": (192, 128, 16, 4, {"dtype": FP16}),
    "dim-256": (256, 256, 16, 4, {"sinks": True}),
    "fp32": (128, 128, 16, 4, {"dtype": FP32}),
}


def launch(
    key_dim: int,
    value_dim: int,
    heads: int,
    groups: int,
    *,
    shared_bytes: int,
    latent: bool = False,
    page: int = 16,
    window: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = BF16,
    short_q_len: int = 1,
    exact_prompts: bool = False,
) -> None:
    """Take a step of a short and a long sequence through one layer."""
    limits = paged.SplitLimits(
        num_seqs=2,
        num_units=2,
        short_q_len=short_q_len,
        shared_bytes=shared_bytes,
        exact_prompts=exact_prompts,
    )
    specs = paged.scratch_specs(
        limits, num_heads=heads, out_dim=max(key_dim, value_dim), device=torch.device("cpu")
    )
    lens = torch.zeros(3, dtype=torch.int32)
    batch = paged.plan_batch(
        torch.zeros(2, 16, dtype=torch.int32),
        write_at=torch.zeros(64, dtype=torch.int64),
        cu_seqlens_q=lens,
        kv_lens=lens[:2],
        page_size=page,
        q_lens=(1, 63),
        kv_lens_host=(64, 64),
        limits=limits,
        scratch={name: spec.empty() for name, spec in specs.items()},
    )
    keys = torch.zeros(4, page, groups, key_dim, dtype=dtype)
    values = torch.zeros(4, page, groups, value_dim, dtype=dtype)
    paged.write_(keys, values, keys[0], values[0], batch)
    query = torch.zeros(64, heads, key_dim, dtype=dtype)
    rule = ScoreRule(scale=0.1, window=window, sinks=query[0, :, 0].clone() if sinks else None)
    if latent:
        rotary = torch.zeros(64, heads, value_dim, dtype=dtype)
        paged.paged_latent_attention(query, rotary, keys, values, batch, rule)
    else:
        paged.paged_attention(query, keys, values, batch, rule)


def main() -> None:
    arch = int(sys.argv[1])
    compiled = compile_for(arch)
    room = paged.shared_room(arch // 10, SHARED_BYTES[arch])
    for name in sys.argv[2:] or FORMS:
        *shape, unusual = FORMS[name]
        launch(*shape, shared_bytes=room, **unusual)
        for kernel_name, kernel in compiled:
            cubin = len(kernel.asm["cubin"])
            print(name, kernel_name, kernel.metadata.shared, cubin)  # noqa: T201 - the result
        compiled.clear()


if __name__ == "__main__":
    main()
