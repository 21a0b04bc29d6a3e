# SPDX-License-Identifier: Apache-2.0
"""SGLang's start-up matrix, row by row, on fake hardware.

Every row that names a contract, a runner or a dispatcher of ours is here, or, where it is about a
flag or a variable, in test_upstream_commands.py. What it does there is the test's id, what we do
is asserted. Where they fail at load, at the first batch or by a bare assertion, we refuse at the
door; where they change a setting silently, a decision says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tetrarch.config.formats import recognise
from tetrarch.config.hardware import Arch
from tetrarch.config.plan import Plan
from tetrarch.config.support import Wire
from tetrarch.core.errors import CheckpointError
from tetrarch.numerics.contract import SourceFormat

BF16, BLOCK, FP8 = SourceFormat.BF16, SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR
NVFP4, COMPRESSED = SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED


@dataclass(frozen=True)
class Case:
    """One row of their matrix.

    Attributes:
        theirs: Condition and result there.
        settings: The same launch in our words.
        words: Parts of our refusal; empty: the launch is accepted.
        contract: What is chosen where it is accepted.
        fake: What is unusual about the checkpoint.
    """

    theirs: str
    settings: dict[str, Any]
    source: SourceFormat = BF16
    words: tuple[str, ...] = ()
    contract: str = ""
    on_cpu: bool = False  # refused with these words on the CPU alone
    fake: dict[str, Any] = field(default_factory=dict)


ONLINE = {"quantization": "nvfp4_online"}
MODELOPT = {"quantization": "modelopt_fp4"}
PER_TOKEN = {"moe_activations": "per_token"}
W4A16 = {"moe_activations": "bf16"}
STATIC, DYNAMIC = "modelopt_fp4/per_tensor", "nvfp4_online/per_token"
PAIRS = (("online", ONLINE, BF16), ("modelopt", MODELOPT, NVFP4))

QUANTIZATION = [
    Case("online outside SM100/103 -> ValueError", ONLINE, contract=DYNAMIC),
    Case("online, runner auto -> flashinfer_trtllm", ONLINE, contract=DYNAMIC),
    Case(
        "online, runner not in the allowed set -> ValueError",
        ONLINE | {"moe_runner": "flashinfer_cutlass"},
        words=("flashinfer_cutlass", "--moe-runner reference"),
    ),
    Case(
        "modelopt_fp4, runner auto, SM120 -> flashinfer_cutlass", MODELOPT, NVFP4, contract=STATIC
    ),
    Case(
        "modelopt_fp4, auto, SM100, some families -> flashinfer_trtllm", {}, NVFP4, contract=STATIC
    ),
    Case(
        "NVFP4 on SM80-SM90 -> marlin, weight-only",
        MODELOPT | W4A16,
        NVFP4,
        contract="modelopt_fp4/bf16",
    ),
    *(
        Case(
            f"NVFP4 with {runner} -> ValueError at layer or runner creation",
            MODELOPT | {"moe_runner": runner},
            NVFP4,
            words=(runner, "--moe-runner reference"),
        )
        for runner in ("marlin", "cutlass")
    ),
    Case(
        "W4A16_NVFP4 layers -> marlin",
        {},
        NVFP4,
        fake={"input_scales": False},
        contract="modelopt_fp4/bf16",
    ),
    *(
        Case(
            f"none, checkpoint {source} -> ValueError about the mismatch",
            {"quantization": "none"},
            source,
            words=("NVFP4 already", "--quantization modelopt_fp4"),
        )
        for source in (NVFP4, COMPRESSED)
    ),
    Case("modelopt_fp4 <= modelopt", MODELOPT, NVFP4, contract=STATIC),
    Case("modelopt_fp4 <= fp8", MODELOPT, BLOCK, contract=STATIC),
    Case("nvfp4_online <= fp8", ONLINE, BLOCK, contract=DYNAMIC),
    Case("nvfp4_online <= modelopt_fp8", ONLINE, FP8, contract=DYNAMIC),
    *(
        Case(
            f"packed FP4 ({source}) + nvfp4_online -> ValueError",
            ONLINE,
            source,
            words=("NVFP4 already", "--quantization modelopt_fp4"),
        )
        for source in (NVFP4, COMPRESSED)
    ),
    *(
        Case(
            f"non-serialized ({source}) + modelopt_fp4 + per-token flag -> ValueError",
            MODELOPT | PER_TOKEN,
            source,
            words=("--quantization nvfp4_online",),
        )
        for source in (BF16, BLOCK, FP8)
    ),
    Case(
        "K not a multiple of 16 online -> ValueError at load",
        ONLINE,
        fake={"sizes": {"expert_intermediate_size": 120}},
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
            "flashinfer_trtllm_routed", "cutlass", "cutedsl",
        )
        for name, settings, source in (
            ("modelopt_fp4", MODELOPT, NVFP4),
            ("nvfp4_online", ONLINE, BF16),
            ("none", {"quantization": "none"}, BF16),
        )
    ),
    *(
        Case(
            f"triton x {name}, NVFP4 -> ValueError",
            settings | {"moe_runner": "triton"},
            source,
            words=("triton", "--moe-runner reference"),
            contract=contract,
            on_cpu=True,
        )
        for name, settings, source, contract in (
            ("modelopt_fp4", MODELOPT, NVFP4, STATIC),
            ("nvfp4_online", ONLINE, BF16, DYNAMIC),
            ("none", {"quantization": "none"}, BF16, "none/bf16"),
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
        for name, settings, source in PAIRS
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
        for name, settings, source in PAIRS
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
        words=("all-to-all dispatcher",),
    ),
    Case(
        "flashinfer A2A + NVFP4 checkpoint -> sets an environment variable to send NVFP4",
        {},
        NVFP4,
        contract=STATIC,
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
        for name, settings, source in PAIRS
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
        words=("--max-dispatch-tokens 1", "all-to-all dispatcher", "tokens required, capacity 1"),
    ),
]

MTP = {"speculative_algorithm": "mtp"}
OTHERS = [
    Case("draft quantization unset -> the target's", ONLINE | MTP, contract=DYNAMIC),
    Case("mixed chunk with speculation -> disabled", ONLINE | MTP, contract=DYNAMIC),
    Case(
        "deterministic: fused finalize -> off",
        ONLINE | {"deterministic": True, "fused_finalize": True},
        words=("contradict each other",),
    ),
    Case(
        "fused finalize",
        ONLINE | {"fused_finalize": True},
        words=("has no fused finalize",),
        contract=DYNAMIC,
        on_cpu=True,
    ),
]


@pytest.mark.parametrize(
    "case", [*QUANTIZATION, *RUNNERS, *A2A, *OTHERS], ids=lambda case: case.theirs
)
def test_every_row_of_the_upstream_matrix_has_an_answer(
    launch: Callable[..., Plan], refused: Callable[..., list[str]], case: Case, arch: Arch
) -> None:
    if case.words and (arch is Arch.CPU or not case.on_cpu):
        text = "\n".join(refused(arch, case.source, **case.fake, **case.settings))
        assert all(words in text for words in case.words), text
        return
    plan = launch(arch, case.source, **case.fake, **case.settings)
    assert plan.quant.contract.name == case.contract
    assert plan.experts.route.runner == ("reference" if arch is Arch.CPU else "triton")
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
