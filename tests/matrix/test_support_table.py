# SPDX-License-Identifier: Apache-2.0
"""Start-up, cell by cell, on fake hardware.

First every row of our own table and every refusal. Then every row of SGLang's start-up matrix
that names a contract, a runner or a dispatcher of ours: what it does there is in the test's id,
what we do is asserted. Where they fail at load, at the first batch or by a bare assertion, we
refuse at the door; where they change a setting silently, a decision says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.cli import parse_args
from tetrarch.config.formats import recognise
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve import resolve
from tetrarch.config.support import REFUSED, SUPPORT, Finalize, Refusal, Route, Wire
from tetrarch.core.errors import CheckpointError, LaunchErrors, Unsupported
from tetrarch.numerics.contract import Activations, Quantization, SourceFormat

BF16, BLOCK, FP8 = SourceFormat.BF16, SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR
NVFP4, COMPRESSED = SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED
ARCHS = [Arch.SM80, Arch.SM90, Arch.SM100, Arch.SM103, Arch.SM120, Arch.CPU]
FAKES = pytest.mark.parametrize("arch", ARCHS)

FACTS = ModelFacts(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    num_layers=4,
    num_moe_layers=4,
    num_experts=8,
    top_k=2,
    hidden_size=256,
    expert_hidden_size=256,
    expert_intermediate_size=128,
    vocab_size=1024,
    context_len=2048,
    num_dense_params=10_000,
    num_expert_params=100_000,
    kv_elements_per_token=1024,
    num_mtp_layers=0,
)


def launch(
    arch: Arch,
    source: SourceFormat = BF16,
    *,
    facts: ModelFacts = FACTS,
    input_scales: bool | None = None,
    **settings: Any,
) -> Plan:
    """Resolve on a fake device, from a checkpoint of a format."""
    serialized = source in (NVFP4, COMPRESSED)
    checkpoint = Checkpoint(
        path="/m",
        config={},
        source=source,
        label=source.upper(),
        dtype="bfloat16",
        quant_ignore=(),
        has_input_scales=serialized if input_scales is None else input_scales,
        kv_quant=None,
        weights=WeightScan(),
    )
    is_cpu = arch is Arch.CPU
    device = Device(
        arch=arch,
        name="fake",
        torch_device="cpu" if is_cpu else "cuda",
        num_devices=1,
        memory_bytes=1 << 36,
        physical_cores=8,
    )
    return resolve(LaunchArgs(**({"model": "m"} | settings)), checkpoint, facts, device)


def refused(arch: Arch, source: SourceFormat = BF16, **settings: Any) -> list[str]:
    """Return everything a launch is refused for."""
    with pytest.raises(LaunchErrors) as caught:
        launch(arch, source, **settings)
    for error in caught.value.errors:
        assert error.why
        assert error.fix
    return [str(error) for error in caught.value.errors]


# Our table.

ROWS = [(row, quantization) for row in SUPPORT for quantization in row.quantizations]


def source_for(quantization: Quantization) -> SourceFormat:
    return NVFP4 if quantization is Quantization.MODELOPT_FP4 else BF16


@pytest.mark.parametrize("arch", list(Arch))
@pytest.mark.parametrize(
    ("row", "quantization"), ROWS, ids=lambda x: x.runner if isinstance(x, Route) else str(x)
)
def test_every_row_is_chosen_where_it_says(
    row: Route, quantization: Quantization, arch: Arch
) -> None:
    settings = {
        "quantization": str(quantization),
        "moe_activations": str(row.activations),
        "moe_runner": row.runner,
        "moe_dispatch": row.dispatch,
        "moe_wire": str(row.wire),
    }
    if arch in row.archs:
        plan = launch(arch, source_for(quantization), **settings)
        assert plan.experts.route is row
        assert plan.experts.finalize is row.finalize[0]
    else:
        (error,) = refused(arch, source_for(quantization), **settings)
        assert "no such row" in error


REFUSALS = [(no, activations) for no in REFUSED for activations in no.activations]
CONTRACT_OF = {
    Activations.PER_TOKEN: ("nvfp4_online", BF16),
    Activations.PER_TENSOR: ("modelopt_fp4", NVFP4),
    Activations.BF16: ("none", BF16),
}


@FAKES
@pytest.mark.parametrize(
    ("refusal", "activations"),
    REFUSALS,
    ids=lambda x: x.subject if isinstance(x, Refusal) else str(x),
)
def test_every_refusal_answers_in_its_own_words(
    refusal: Refusal, activations: Activations, arch: Arch
) -> None:
    quantization, source = CONTRACT_OF[activations]
    settings = {
        "quantization": quantization,
        "moe_activations": str(activations),
        "moe_runner": refusal.runner or "auto",
        "moe_dispatch": refusal.dispatch or "auto",
        "moe_wire": refusal.wire or "auto",
        "fused_finalize": refusal.finalize is Finalize.FUSED,
    }
    (error,) = refused(arch, source, **settings)
    assert refusal.why in error
    assert refusal.fix in error


# SGLang's start-up matrix.


@dataclass(frozen=True)
class Case:
    """One row of their matrix.

    Attributes:
        theirs: Condition and result there.
        settings: The same launch in our words.
        words: Parts of our refusal; empty: the launch is accepted.
        contract: What is chosen where it is accepted.
    """

    theirs: str
    settings: dict[str, Any]
    source: SourceFormat = BF16
    words: tuple[str, ...] = ()
    contract: str = ""
    input_scales: bool | None = None
    facts: ModelFacts = FACTS


ONLINE = {"quantization": "nvfp4_online"}
MODELOPT = {"quantization": "modelopt_fp4"}
PER_TOKEN = {"moe_activations": "per_token"}
W4A16 = {"moe_activations": "bf16"}

QUANTIZATION = [
    Case("online outside SM100/103 -> ValueError", ONLINE, contract="nvfp4_online/per_token"),
    Case("online, runner auto -> flashinfer_trtllm", ONLINE, contract="nvfp4_online/per_token"),
    Case(
        "online, runner not in the allowed set -> ValueError",
        ONLINE | {"moe_runner": "flashinfer_cutlass"},
        words=("flashinfer_cutlass", "--moe-runner reference"),
    ),
    Case(
        "modelopt_fp4, runner auto, SM120 -> flashinfer_cutlass",
        MODELOPT,
        NVFP4,
        contract="modelopt_fp4/per_tensor",
    ),
    Case(
        "modelopt_fp4, auto, SM100, some families -> flashinfer_trtllm",
        {},
        NVFP4,
        contract="modelopt_fp4/per_tensor",
    ),
    Case(
        "NVFP4 on SM80-SM90 -> marlin, weight-only",
        MODELOPT | W4A16,
        NVFP4,
        contract="modelopt_fp4/bf16",
    ),
    Case(
        "NVFP4 where marlin is impossible -> ValueError at layer creation",
        MODELOPT | {"moe_runner": "marlin"},
        NVFP4,
        words=("marlin", "--moe-runner reference"),
    ),
    Case(
        "NVFP4 with plain cutlass -> NotImplementedError at runner creation",
        MODELOPT | {"moe_runner": "cutlass"},
        NVFP4,
        words=("cutlass", "--moe-runner reference"),
    ),
    Case(
        "W4A16_NVFP4 layers -> marlin",
        {},
        NVFP4,
        input_scales=False,
        contract="modelopt_fp4/bf16",
    ),
    Case("modelopt_fp4 <= modelopt", MODELOPT, NVFP4, contract="modelopt_fp4/per_tensor"),
    Case("modelopt_fp4 <= fp8", MODELOPT, BLOCK, contract="modelopt_fp4/per_tensor"),
    Case("nvfp4_online <= fp8", ONLINE, BLOCK, contract="nvfp4_online/per_token"),
    Case("nvfp4_online <= modelopt_fp8", ONLINE, FP8, contract="nvfp4_online/per_token"),
    Case(
        "packed FP4 + nvfp4_online -> ValueError",
        ONLINE,
        NVFP4,
        words=("NVFP4 already", "--quantization modelopt_fp4"),
    ),
    Case(
        "packed FP4 of compressed-tensors + nvfp4_online -> ValueError",
        ONLINE,
        COMPRESSED,
        words=("NVFP4 already", "--quantization modelopt_fp4"),
    ),
    Case(
        "non-serialized + modelopt_fp4 + per-token flag -> ValueError",
        MODELOPT | PER_TOKEN,
        BF16,
        words=("--quantization nvfp4_online",),
    ),
    Case(
        "non-serialized FP8 + modelopt_fp4 + per-token flag -> ValueError",
        MODELOPT | PER_TOKEN,
        BLOCK,
        words=("--quantization nvfp4_online",),
    ),
    Case(
        "K not a multiple of 16 online -> ValueError at load",
        ONLINE,
        facts=replace(FACTS, expert_intermediate_size=120),
        words=("intermediate size 120", "--quantization none"),
    ),
]

RUNNERS = [
    *(
        Case(
            f"{runner} x {name}, ep 1 or tp -> assert",
            settings | {"moe_runner": runner},
            source,
            words=(runner, "--moe-runner reference"),
        )
        for runner in (
            "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm",
            "flashinfer_trtllm_routed", "cutlass", "cutedsl", "triton",
        )
        for name, settings, source in (
            ("modelopt_fp4", MODELOPT, NVFP4),
            ("nvfp4_online", ONLINE, BF16),
            ("none", {"quantization": "none"}, BF16),
        )
    ),
    *(
        Case(
            f"flashinfer_cutedsl, ep {size} -> assert unless 1 or tp",
            ONLINE | {"moe_runner": "flashinfer_cutedsl", "ep_size": size},
            words=(f"--ep-size {size}", "flashinfer_cutedsl"),
        )
        for size in (2, 8)
    ),
]  # fmt: skip

A2A = [
    Case(
        "cutedsl with A2A not in none, deepep, flashinfer -> assert",
        ONLINE | {"moe_dispatch": "mooncake"},
        words=("mooncake", "--moe-dispatch all_gather"),
    ),
    *(
        Case(
            f"cutedsl + deepep + per token ({name}) -> ValueError",
            settings | PER_TOKEN | {"moe_dispatch": "deepep"},
            source,
            words=("one FP32 scale per token", "--moe-dispatch all_gather"),
        )
        for name, settings, source in (("online", ONLINE, BF16), ("modelopt", MODELOPT, NVFP4))
    ),
    Case(
        "cutedsl + deepep, mode auto -> low_latency; mode normal -> ValueError",
        MODELOPT | {"moe_dispatch": "deepep"},
        NVFP4,
        words=("DeepEP dispatcher is not part",),
    ),
    *(
        Case(
            f"cutedsl W4A16 + DeepEP ({name}) -> ValueError at apply time",
            settings | W4A16 | {"moe_dispatch": "deepep"},
            source,
            words=("BF16 activations are never quantized",),
        )
        for name, settings, source in (("online", ONLINE, BF16), ("modelopt", MODELOPT, NVFP4))
    ),
    Case(
        "spanning A2A, ep != tp -> ep := tp",
        ONLINE | {"moe_dispatch": "all_to_all", "tp_size": 4, "ep_size": 2},
        words=("--tp-size 4", "--ep-size 2", "all-to-all dispatcher is not part"),
    ),
    Case(
        "flashinfer A2A without attention-DP equal to TP -> assert",
        ONLINE | {"moe_dispatch": "all_to_all"},
        words=("all-to-all dispatcher is not part",),
    ),
    Case(
        "flashinfer A2A, runner outside the allowed set -> assert",
        ONLINE | {"moe_dispatch": "all_to_all", "moe_runner": "triton"},
        words=("all-to-all dispatcher", "the Triton runner"),
    ),
    Case(
        "flashinfer A2A + NVFP4 checkpoint -> sets an environment variable to send NVFP4",
        {},
        NVFP4,
        contract="modelopt_fp4/per_tensor",
    ),
    Case(
        "dispatch nvfp4 without NVFP4 weights -> ValueError",
        {"quantization": "none", "moe_wire": "nvfp4"},
        words=("never travel quantized", "--moe-wire bf16"),
    ),
    Case(
        "W4A16 + nvfp4 dispatch -> ValueError",
        MODELOPT | W4A16 | {"moe_wire": "nvfp4"},
        NVFP4,
        words=("never travel quantized", "--moe-wire bf16"),
    ),
    *(
        Case(
            f"per-token path receives pre-quantized dispatch ({name}) -> ValueError at run time",
            settings | PER_TOKEN | {"moe_wire": "nvfp4"},
            source,
            words=("never travel quantized", "--moe-wire bf16"),
        )
        for name, settings, source in (("online", ONLINE, BF16), ("modelopt", MODELOPT, NVFP4))
    ),
    Case(
        "static NVFP4 dispatch with flashinfer A2A",
        MODELOPT | {"moe_wire": "nvfp4", "moe_dispatch": "all_to_all"},
        NVFP4,
        words=("no dispatcher of tetrarch quantizes", "all-to-all dispatcher"),
    ),
    *(
        Case(
            f"{name}: architecture, quantization, runner lists -> ValueError or assert",
            ONLINE | {"moe_dispatch": name},
            words=(name, "--moe-dispatch all_gather"),
        )
        for name in ("megamoe", "deepep_v2")
    ),
    Case(
        "A2A token budget too small -> ValueError",
        ONLINE | {"moe_dispatch": "all_to_all", "max_dispatch_tokens": 1},
        words=("--max-dispatch-tokens 1", "all-to-all dispatcher"),
    ),
]

DETERMINISM = [
    Case(
        "speculation: draft quantization unset -> the target's",
        ONLINE | {"speculative_algorithm": "mtp"},
        words=("--speculative-algorithm mtp is not supported yet",),
    ),
    Case(
        "mixed chunk with speculation -> disabled",
        ONLINE | {"speculative_algorithm": "mtp", "mixed_chunk": True},
        words=("--speculative-algorithm",),
    ),
    Case(
        "deterministic: fused MoE finalize -> off",
        ONLINE | {"deterministic": True},
        words=("--deterministic is not supported yet",),
    ),
    Case(
        "fused finalize asked for",
        ONLINE | {"fused_finalize": True},
        words=("no runner of tetrarch has a fused finalize yet",),
    ),
]


@FAKES
@pytest.mark.parametrize(
    "case", [*QUANTIZATION, *RUNNERS, *A2A, *DETERMINISM], ids=lambda case: case.theirs
)
def test_every_row_of_the_upstream_matrix_has_an_answer(case: Case, arch: Arch) -> None:
    arguments = {"facts": case.facts, "input_scales": case.input_scales}
    if case.words:
        text = "\n".join(refused(arch, case.source, **arguments, **case.settings))
        assert all(words in text for words in case.words), text
        return
    plan = launch(arch, case.source, **arguments, **case.settings)
    assert plan.quant.contract.name == case.contract
    assert plan.experts.route.runner == "reference"
    assert plan.experts.route.wire is Wire.BF16  # nothing is sent quantized behind anybody's back


@pytest.mark.parametrize(
    ("theirs", "section"),
    [
        ("source MXFP8 + nvfp4_online -> ValueError", {"quant_method": "mxfp8"}),
        (
            "quant_algo outside the known ones -> ValueError",
            {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"},
        ),
        (
            "W4A16 layers in a mixed checkpoint -> marlin",
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        ),
        (
            "group size other than 16 -> ValueError",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        ),
    ],
)
def test_formats_are_refused_before_any_contract(theirs: str, section: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        recognise({"quantization_config": section}, None)
    assert caught.value.fix, theirs


def test_a_wire_and_its_variable_that_disagree_are_refused() -> None:
    """There: a dispatch-type flag together with the variable -> ValueError."""
    with pytest.raises(LaunchErrors, match="disagree"):
        parse_args(["--moe-wire", "bf16"], {"SGLANG_MOE_NVFP4_DISPATCH": "1"})


def test_unsupported_is_the_type_of_a_refusal() -> None:
    with pytest.raises(LaunchErrors) as caught:
        launch(Arch.SM90, **ONLINE, moe_dispatch="deepep")
    assert isinstance(caught.value.errors[0], Unsupported)
