# SPDX-License-Identifier: Apache-2.0
"""Steps of paged attention to measure: layers, sequences, pages in random order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from measure import BEYOND_CACHE
from torch import Tensor

from tetrarch.kernels.attention import triton as paged
from tetrarch.kernels.attention.reference import ScoreRule

__all__ = ["GQA", "LIMITS", "MLA", "Layer", "Step", "decode_step"]

LIMITS = dict(num_seqs=256, num_units=16384)


@dataclass(frozen=True)
class Layer:
    """The shape of an attention layer."""

    name: str
    heads: int
    groups: int
    dim: int
    value_dim: int
    latent: bool = False

    @property
    def out_dim(self) -> int:
        """Numbers of a head's output."""
        return self.dim if self.latent else self.value_dim

    @property
    def bytes_per_key(self) -> int:
        """What a token keeps, in BF16."""
        return 2 * self.groups * (self.dim + self.value_dim)

    @property
    def flop_per_pair(self) -> int:
        """Operations for one query and one key, all heads."""
        return 2 * self.heads * (self.dim + self.out_dim + self.value_dim * self.latent)


GQA = Layer("GQA 32/4 x 128", 32, 4, 128, 128)
MLA = Layer("MLA 128 x 512+64", 128, 1, 512, 64, latent=True)


class Step:
    """Sequences, several layers' worth of pages, and how often a step takes its turn of them."""

    def __init__(
        self,
        layer: Layer,
        lens: list[tuple[int, int]],
        *,
        page: int,
        layers: int,
        limits: Any,
        device: str = "cuda",
    ) -> None:
        torch.manual_seed(0)
        self.layer, self.lens, self.page, self.device = layer, lens, page, device
        counts = [-(-kv_len // page) for _, kv_len in lens]
        order = torch.randperm(sum(counts), device=self.device).int()
        table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=self.device)
        for row, pages in enumerate(order.split(counts)):
            table[row, : len(pages)] = pages
        self.layers = layers if layers == 1 else max(48, layers)  # as Qwen3-30B-A3B has
        self.tokens = sum(q_len for q_len, _ in lens)
        ends = torch.tensor([0, *(q_len for q_len, _ in lens)]).cumsum(0).int()
        self.pools = [
            tuple(
                torch.randn(
                    sum(counts), page, layer.groups, dim, device=self.device, dtype=torch.bfloat16
                )
                for dim in (layer.dim, layer.value_dim)
            )
            for _ in range(layers)
        ]
        self.queries = [
            torch.randn(self.tokens, layer.heads, dim, device=self.device, dtype=torch.bfloat16)
            for dim in (layer.dim, layer.value_dim)
        ]
        self.rule = ScoreRule(scale=(layer.dim + layer.value_dim * layer.latent) ** -0.5)
        self.inputs = dict(
            page_table=table,
            write_at=torch.zeros(self.tokens, dtype=torch.int64, device=self.device),
            cu_seqlens_q=ends.to(self.device),
            kv_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=self.device),
            page_size=page,
            q_lens=tuple(q_len for q_len, _ in lens),
            kv_lens_host=tuple(kv_len for _, kv_len in lens),
        )
        units = max(1, paged.units_of(self.inputs["q_lens"], self.inputs["kv_lens_host"], limits))
        self.limits = replace(limits, num_units=units)
        specs = paged.scratch_specs(
            self.limits, num_heads=layer.heads, out_dim=layer.out_dim, device=self.device
        )
        self.scratch = {name: spec.empty() for name, spec in specs.items()}

    def run(self) -> Tensor:
        """Attend once in every layer, as in a model; returns the first layer's output."""
        batch = paged.plan_batch(**self.inputs, limits=self.limits, scratch=self.scratch)
        outputs = []
        for layer in range(self.layers):
            keys, values = self.pools[layer % len(self.pools)]
            if self.layer.latent:
                out = paged.paged_latent_attention(*self.queries, keys, values, batch, self.rule)
            else:
                out = paged.paged_attention(self.queries[0], keys, values, batch, self.rule)
            outputs.append(out)
        return outputs[0]

    def gather(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return one sequence's queries, keys and values of the first layer in FP32, (H, n, d)."""
        kv_len = self.lens[row][1]
        pages = self.inputs["page_table"][row, : -(-kv_len // self.page)].long()
        keys, values = (
            pool[pages].flatten(0, 1)[:kv_len].float().transpose(0, 1) for pool in self.pools[0]
        )
        begin, end = self.inputs["cu_seqlens_q"][row : row + 2].tolist()
        query = self.queries[0][begin:end]
        if self.layer.latent:
            query = torch.cat([part[begin:end] for part in self.queries], -1)
            keys, values = torch.cat((keys, values), -1), keys
        shared = self.layer.heads // self.layer.groups
        return (
            query.float().transpose(0, 1),
            keys.repeat_interleave(shared, 0),
            values.repeat_interleave(shared, 0),
        )

    def error(self) -> float:
        """Return the largest error of the first and the last sequence, at most 256 rows of each.

        In units of the result's root mean square.
        """
        got = self.run()
        worst = 0.0
        for row in {0, len(self.lens) - 1}:
            query, keys, values = self.gather(row)
            q_len, kv_len = self.lens[row]
            rows = min(q_len, 256)
            scores = query[:, -rows:] @ keys.transpose(1, 2) * self.rule.scale
            at = torch.arange(kv_len - rows, kv_len, device=self.device)[:, None]
            scores.masked_fill_(torch.arange(kv_len, device=self.device) > at, float("-inf"))
            want = (scores.softmax(-1) @ values).transpose(0, 1)
            end = int(self.inputs["cu_seqlens_q"][row + 1])
            difference = (
                got[end - rows : end].float() - want
            ).abs().max() / want.square().mean().sqrt()
            worst = max(worst, difference.item())
        return worst


def decode_step(
    layer: Layer, shape: tuple[int, int], *, page: int, limits: Any, q_len: int = 1
) -> Step:
    """Return a step of so many sequences of so many keys, which a few lack so that tails differ.

    Its layers together exceed the cache.
    """
    streams, kv_len = shape
    lens = [(q_len, kv_len - row % 7) for row in range(streams)]
    size = layer.bytes_per_key * sum(kv for _, kv in lens)
    layers = max(1, min(16, -(-BEYOND_CACHE // size)))
    return Step(layer, lens, page=page, layers=layers, limits=limits)
