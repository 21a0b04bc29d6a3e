# SPDX-License-Identifier: Apache-2.0
"""What is resident is told in the words of the checkpoint it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tetrarch.core.errors import CheckpointError, RequestError
from tetrarch.memory.checksum import digest
from tetrarch.models import readback
from tetrarch.models.readback import checksums, read_back, verify
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations, Quantization, SourceFormat

ONLINE: dict[str, Any] = {"quantization": Quantization.NVFP4_ONLINE, "source": SourceFormat.FP32}
EXPERT = "model.layers.0.mlp.experts.2"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_an_unquantized_model_gives_back_every_tensor_of_its_checkpoint(
    lab: Any, family: str
) -> None:
    """Fused, interleaved and transposed stacks of gpt-oss and its biases included."""
    path = lab.tiny(family)
    model, report = lab.load(path)
    unused = {name for names in report.unused.values() for name in names}
    for name, stored in load_file(path / "model.safetensors").items():
        if name not in unused:
            assert torch.equal(read_back(model, name), stored), name


def test_an_expert_quantized_here_comes_back_as_its_codes_decode(lab: Any) -> None:
    path = lab.tiny("qwen3_moe")
    model, _ = lab.load(path, **ONLINE)
    tensors = load_file(path / "model.safetensors")
    gate, up = (tensors[f"{EXPERT}.{part}_proj.weight"] for part in ("gate", "up"))
    amax = torch.maximum(gate.abs().max(), up.abs().max())
    for name, stored in (("gate", gate), ("up", up)):
        plan = lab.plan(path, **ONLINE)
        encoded = nvfp4.encode_weight(stored, recipe=plan.quant.weight_recipe, amax=amax)
        expected = nvfp4.decode(encoded[0], encoded[1], global_scale=encoded[2])
        assert torch.equal(read_back(model, f"{EXPERT}.{name}_proj.weight"), expected)


def test_gate_and_up_of_different_scales_are_decoded_by_their_own(lab: Any) -> None:
    path, values = lab.store(lab.tiny("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    model, _ = lab.load(
        path,
        quantization=Quantization.MODELOPT_FP4,
        activations=Activations.PER_TENSOR,
        source=SourceFormat.NVFP4_MODELOPT,
    )
    for part in ("gate", "up", "down"):
        name = f"{EXPERT}.{part}_proj.weight"
        assert torch.equal(read_back(model, name), values[name])


@pytest.mark.parametrize("name", ["", "nonsense", "model.layers.0.mlp.experts.99.up_proj.weight"])
def test_a_name_that_the_model_does_not_have_is_the_clients_error(lab: Any, name: str) -> None:
    model, _ = lab.load(lab.tiny("qwen3_moe"))
    with pytest.raises(RequestError, match="there is no weight"):
        read_back(model, name)


def test_every_slot_is_covered_by_a_checksum(lab: Any) -> None:
    """Spoiling any one slot changes them; what is derived from others (a cache) is exempt."""
    model, _ = lab.load(lab.tiny("qwen3_moe"), **ONLINE)
    whole = checksums(model)
    tables = [model.weights, *(layer.weights for layer in model.experts.values())]
    for table in tables:
        for name, slot in table.items():
            octets = slot.reshape(-1).view(torch.uint8)
            octets[-1] ^= 1
            assert (checksums(model) != whole) is not name.endswith("_decoded"), name
            octets[-1] ^= 1
    assert checksums(model) == whole


def test_verifying_names_what_differs(lab: Any) -> None:
    model, _ = lab.load(lab.tiny("qwen3_moe"), **ONLINE)
    written = checksums(model)
    verify(model, written)
    layer = model.experts["model.layers.1.mlp.experts"]
    layer.weights["down"][0, 0, 0] ^= 1
    with pytest.raises(CheckpointError, match="1 tensors") as refused:
        verify(model, written)
    assert refused.value.why == "model.layers.1.mlp.experts.down"


def test_verifying_reads_what_was_written_and_nothing_else(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that pushes one norm must not wait for the digests of a whole model."""
    model, _ = lab.load(lab.tiny("qwen3_moe"), **ONLINE)
    layer, norm = "model.layers.1.mlp.experts", "model.norm.weight"
    whole = checksums(model)
    written = {n: told for n, told in whole.items() if n == norm or n.startswith(f"{layer}.")}
    assert checksums(model, only=written) == written
    read: list[int] = []
    monkeypatch.setattr(readback, "digest", lambda tensor: read.append(1) or digest(tensor))
    verify(model, written)
    assert len(read) == len(written) < len(whole)
