# SPDX-License-Identifier: Apache-2.0
"""Random weights of any configuration, made where they will be used: `--load-format dummy`."""

from __future__ import annotations

import time
import zlib

import torch
from torch import Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.core.progress import Progress
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.report import LoadReport
from tetrarch.moe.dummy import random_experts

__all__ = ["make_weights"]


@torch.no_grad()
def make_weights(
    model: Model, quant: QuantPlan, *, progress: Progress, seed: int = 0
) -> LoadReport:
    """Fill every weight of a new model with numbers that keep activations and logits of size one.

    Norms are near one. A matrix of K columns has a deviation of `K ** -0.5`, routers included, so
    that tokens spread over the experts evenly. Embeddings have one of 1, so that what attention
    adds, which is alike for all tokens of a sequence, does not send them to the same experts;
    those that are the head as well are a matrix like the others.

    Args:
        model: Built; its slots are written, never replaced.
        quant: The experts' contract.
        progress: Told in tensors.
        seed: The same seed on the same kind of device makes the same weights: each tensor has a
            generator of its own, so that its numbers depend on nothing else.
    """
    began = time.perf_counter()
    journal, num_bytes = Journal(keeps=False), 0
    progress.start("making weights up", len(model.weights) + len(model.experts), "tensors")
    try:
        lookup = _lookup_table(model)
        for name, slot in model.weights.items():
            centre, std = (0.0, 1.0) if slot.data_ptr() == lookup else _normal_of(name, slot)
            slot.normal_(centre, std, generator=_generator(name, seed, model.device))
            num_bytes += slot.nbytes
            progress.advance()
        for path, layer in model.experts.items():
            generator = _generator(path, seed, model.device)
            ignored = path in model.ignored
            experts = random_experts(
                layer.spec, quant.at(path), ignored=ignored, generator=generator
            )
            layer.load(experts, journal)
            num_bytes += layer.weights.num_bytes
            progress.advance()
    finally:
        progress.finish()
    specs = [layer.spec for layer in model.experts.values()]
    return LoadReport(
        source="random numbers",
        num_tensors=0,
        num_bytes=num_bytes,
        num_dense=len(model.weights),
        num_expert_matrices=sum(spec.num_local_experts * len(spec.parts) for spec in specs),
        seconds=time.perf_counter() - began,
        formats={},
        decoded=(),
        unused={},
    )


def _lookup_table(model: Model) -> int | None:
    """Return the address of the embedding, unless it is the head as well."""
    embedding, head = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
    address = embedding.get_parameter("weight").data_ptr()
    tied = head is not None and head.get_parameter("weight").data_ptr() == address
    return None if tied else address


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _normal_of(name: str, slot: Tensor) -> tuple[float, float]:
    """Return mean and deviation of a weight's numbers."""
    if slot.dim() > 1:
        return 0.0, slot[0].numel() ** -0.5
    return (1.0 if name.endswith("weight") else 0.0), 0.02  # a norm, or a bias
