# SPDX-License-Identifier: Apache-2.0
"""Bytes that other quantizers wrote, decoded here: their own decoders, and real exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.numerics import nvfp4
from tolerance import EXTRA_FP32_ROUNDING, RECIPROCAL_SCALE, assert_close

PEER_SETS = ["rand_bf16", "heavy_bf16", "weight_bf16", "hard_bf16", "hardgs1_bf16"]


def peers_of(golden: Path, name: str) -> dict[str, Tensor]:
    return load_file(golden / f"peers_{name}.safetensors")


def e4m3(raw_bytes: Tensor) -> Tensor:
    return raw_bytes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", PEER_SETS)
def test_decoding_equals_modelopt_and_torchao(golden: Path, name: str) -> None:
    peers = peers_of(golden, name)
    for peer, scale in (
        ("modelopt", peers["modelopt.weight_scale_2"]),
        ("torchao_2level", peers["torchao_2level.per_tensor_scale"]),
        ("torchao_1level", None),
    ):
        codes, block_scale = peers[f"{peer}.packed"], e4m3(peers[f"{peer}.sf"])
        decoded = nvfp4.decode(codes, block_scale, global_scale=scale)
        assert_close(decoded, peers[f"{peer}.dequant"], EXTRA_FP32_ROUNDING)


@pytest.mark.parametrize("name", PEER_SETS)
def test_decoding_equals_compressed_tensors(golden: Path, name: str) -> None:
    """They store the encode scale, and decode to BF16."""
    peers = peers_of(golden, name)
    for peer in ("ct_bf16", "ct_fp32"):
        codes, block_scale = peers[f"{peer}.packed"], e4m3(peers[f"{peer}.sf"])
        scale = peers[f"{peer}.weight_global_scale"].reciprocal()
        decoded = nvfp4.decode(codes, block_scale, global_scale=scale, dtype=torch.bfloat16)
        assert torch.equal(decoded.float(), peers[f"{peer}.dequant"])


def exported_matrices(golden: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and BF16 source of every expert matrix of the tiny exports."""
    source = load_file(golden / "modelopt_nvfp4_tiny_moe" / "source_bf16.safetensors")
    gate, up = source["model.layers.0.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    down = source["model.layers.0.mlp.experts.down_proj"]
    for expert in range(2):
        for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            yield f"model.layers.0.mlp.experts.{expert}.{name}", matrices[expert]


def worst_error(decoded: Tensor, source: Tensor, block_scale: Tensor, scale: Tensor) -> float:
    """In units of a block's scale; the widest gap of E2M1 is 2 of them, so 1 is the most."""
    step = (block_scale.float() * scale).repeat_interleave(16, dim=1)
    return ((decoded - source.float()).abs() / step).max().item()


def test_a_modelopt_export_decodes_to_its_source(golden: Path) -> None:
    export = load_file(golden / "modelopt_nvfp4_tiny_moe" / "model.safetensors")
    for name, source in exported_matrices(golden):
        codes, block_scale = export[f"{name}.weight"], export[f"{name}.weight_scale"]
        scale = export[f"{name}.weight_scale_2"]
        decoded = nvfp4.decode(codes, block_scale, global_scale=scale)
        assert worst_error(decoded, source, block_scale, scale) <= 1.0 + 1e-5
        # Nibbles the other way round, or the scale of another convention, cannot pass.
        swapped = nvfp4.decode((codes << 4) | (codes >> 4), block_scale, global_scale=scale)
        assert worst_error(swapped, source, block_scale, scale) > 2.0
        inverted = nvfp4.decode(codes, block_scale, global_scale=scale.reciprocal())
        assert worst_error(inverted, source, block_scale, scale) > 2.0


def test_a_compressed_tensors_export_decodes_to_the_same_weights(golden: Path) -> None:
    """It was converted from the former: the same bytes under other names, the scale inverted."""
    modelopt = load_file(golden / "modelopt_nvfp4_tiny_moe" / "model.safetensors")
    compressed = load_file(golden / "ct_nvfp4_tiny_moe" / "model.safetensors")
    for name, _ in exported_matrices(golden):
        expected = nvfp4.decode(
            modelopt[f"{name}.weight"],
            modelopt[f"{name}.weight_scale"],
            global_scale=modelopt[f"{name}.weight_scale_2"],
        )
        decoded = nvfp4.decode(
            compressed[f"{name}.weight_packed"],
            compressed[f"{name}.weight_scale"],
            global_scale=compressed[f"{name}.weight_global_scale"].reciprocal(),
        )
        assert_close(decoded, expected, RECIPROCAL_SCALE)
