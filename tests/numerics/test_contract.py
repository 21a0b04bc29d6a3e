# SPDX-License-Identifier: Apache-2.0
"""Contracts are data; these are the rules the data must obey."""

from __future__ import annotations

import pytest

from tetrarch.numerics.contract import (
    CONTRACTS,
    WEIGHT_RECIPE,
    Activations,
    QuantContract,
    Quantization,
    Recipe,
    Scope,
    SourceFormat,
    activations_of,
    contract_for,
)

NVFP4 = {SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED}
every_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)


def test_the_pairs_are_these() -> None:
    assert [contract.name for contract in CONTRACTS] == [
        "nvfp4_online/per_token",
        "nvfp4_online/bf16",
        "modelopt_fp4/per_tensor",
        "modelopt_fp4/per_token",
        "modelopt_fp4/bf16",
        "none/bf16",
    ]


def test_the_first_pair_of_a_quantization_is_its_default() -> None:
    for quantization in Quantization:
        default = contract_for(quantization)
        assert default is not None
        assert default.activations is activations_of(quantization)[0]
    assert contract_for(Quantization.NONE, Activations.PER_TOKEN) is None


@every_contract
def test_activations_say_whose_scale_it_is(contract: QuantContract) -> None:
    scopes = [scale.scope for scale in contract.activation_scales]
    assert (
        scopes
        == {
            Activations.PER_TOKEN: [Scope.BLOCK, Scope.TOKEN],
            Activations.PER_TENSOR: [Scope.BLOCK, Scope.TENSOR],
            Activations.BF16: [],
        }[contract.activations]
    )
    assert contract.quantizes_activations is bool(scopes)


@every_contract
def test_only_a_tensors_scale_is_calibrated_beforehand(contract: QuantContract) -> None:
    for scale in contract.activation_scales:
        assert scale.dynamic is (scale.scope is not Scope.TENSOR)
    assert not any(scale.dynamic for scale in contract.weight_scales)


@every_contract
def test_serialized_weights_belong_to_modelopt_fp4_alone(contract: QuantContract) -> None:
    takes_packed = bool(NVFP4 & contract.sources)
    assert takes_packed is (contract.quantization is Quantization.MODELOPT_FP4)
    assert contract.quantizes_weights is (contract.quantization is not Quantization.NONE)


def test_per_token_under_modelopt_fp4_needs_serialized_weights() -> None:
    contract = contract_for(Quantization.MODELOPT_FP4, Activations.PER_TOKEN)
    assert contract is not None
    assert contract.sources == NVFP4


def test_only_online_contracts_bind_the_draft() -> None:
    for contract in CONTRACTS:
        assert contract.covers_draft is (contract.quantization is Quantization.NVFP4_ONLINE)


@pytest.mark.parametrize(("e4m3_max", "steps"), [(448, 2688), (256, 1536)])
def test_the_token_factor_spans_codes_and_block_scales(e4m3_max: int, steps: int) -> None:
    assert Recipe(e4m3_max).token_factor == 1 / steps


def test_online_weights_have_one_recipe() -> None:
    assert Recipe(448, "mse", half_error=True) == WEIGHT_RECIPE
