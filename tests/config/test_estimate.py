# SPDX-License-Identifier: Apache-2.0
"""Bytes are counted as the tensors will take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.estimate import estimate_memory
from tetrarch.config.plan import ModelFacts
from tetrarch.models.describe import describe
from tetrarch.numerics.contract import Quantization, contract_for

ONLINE = contract_for(Quantization.NVFP4_ONLINE)
PLAIN = contract_for(Quantization.NONE)
assert ONLINE is not None
assert PLAIN is not None


def test_a_model_that_is_not_quantized_takes_what_its_file_takes(demo_path: Path) -> None:
    facts = describe(str(demo_path))
    estimate = estimate_memory(facts, PLAIN, dtype="bfloat16", decoded_cache=False)
    file = read_checkpoint(str(demo_path)).weights.num_bytes
    mtp = 0.14 * file  # the file holds one MTP layer more
    assert estimate.dense + estimate.experts == pytest.approx(file - mtp, rel=0.03)
    assert estimate.decoded_experts == 0


def test_nvfp4_takes_nine_sixteenths_of_a_byte(facts: ModelFacts) -> None:
    estimate = estimate_memory(facts, ONLINE, dtype="bfloat16", decoded_cache=True)
    codes, scales = facts.num_expert_params // 2, facts.num_expert_params // 16
    assert estimate.experts == pytest.approx(codes + scales, abs=1)
    assert estimate.decoded_experts == estimate.unquantized_experts == facts.num_expert_params * 2


def test_fp32_doubles_what_is_not_packed(facts: ModelFacts) -> None:
    half = estimate_memory(facts, ONLINE, dtype="bfloat16", decoded_cache=False)
    full = estimate_memory(facts, ONLINE, dtype="float32", decoded_cache=False)
    assert (full.dense, full.kv_per_token) == (half.dense * 2, half.kv_per_token * 2)
    assert full.experts == half.experts


def test_a_draft_is_counted_under_its_own_contract(facts: ModelFacts) -> None:
    drafted = replace(
        facts,
        num_draft_dense_params=1000,
        num_draft_expert_params=3200,
        draft_kv_elements_per_token=64,
    )
    without = estimate_memory(drafted, ONLINE, dtype="bfloat16", decoded_cache=True)
    plain = estimate_memory(drafted, ONLINE, dtype="bfloat16", decoded_cache=True, draft=PLAIN)
    packed = estimate_memory(drafted, ONLINE, dtype="bfloat16", decoded_cache=True, draft=ONLINE)
    assert plain.dense - without.dense == packed.dense - without.dense == 2000
    assert plain.experts - without.experts == 6400
    assert packed.experts - without.experts == 1800
    assert plain.decoded_experts == without.decoded_experts == packed.decoded_experts - 6400
    assert packed.kv_per_token - without.kv_per_token == 128
