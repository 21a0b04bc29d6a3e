# SPDX-License-Identifier: Apache-2.0
"""The table as a whole; its rows and refusals, one by one, are in tests/matrix."""

from __future__ import annotations

import itertools

import pytest

from tetrarch.config.hardware import Arch
from tetrarch.config.support import (
    REFUSED,
    SUPPORT,
    Finalize,
    Query,
    Refusal,
    Route,
    Wire,
    choose,
    dispatch_names,
    runner_names,
)
from tetrarch.core.errors import LaunchErrors, Unsupported
from tetrarch.numerics.contract import CONTRACTS, Activations, Quantization


def query(**columns: object) -> Query:
    wanted: dict[str, object] = {
        "activations": Activations.PER_TOKEN,
        "quantization": Quantization.NVFP4_ONLINE,
        "arch": Arch.SM100,
    }
    return Query(**(wanted | columns))  # pyright: ignore[reportArgumentType]


def test_every_contract_runs_everywhere() -> None:
    for contract, arch in itertools.product(CONTRACTS, Arch):
        asked = query(
            activations=contract.activations, quantization=contract.quantization, arch=arch
        )
        assert choose(asked).activations is contract.activations


def test_no_row_carries_a_pair_that_is_no_contract() -> None:
    pairs = {(c.quantization, c.activations) for c in CONTRACTS}
    for row in SUPPORT:
        assert {(q, row.activations) for q in row.quantizations} <= pairs


def test_per_token_and_bf16_never_travel_quantized() -> None:
    for row in SUPPORT:
        if row.activations in (Activations.PER_TOKEN, Activations.BF16):
            assert row.wire is Wire.BF16
            assert row.dispatch != "deepep"


def test_every_row_can_sum_in_a_fixed_order() -> None:
    assert all(Finalize.SEPARATE in row.finalize for row in SUPPORT)


def test_a_refusal_never_hides_a_row() -> None:
    """What the table supports must not be refused as well: the docs would contradict it."""
    for row, quantization, arch in itertools.product(SUPPORT, Quantization, Arch):
        if arch not in row.archs:
            continue
        asked = query(
            activations=row.activations,
            quantization=quantization,
            arch=arch,
            runner=row.runner,
            dispatch=row.dispatch,
            wire=row.wire,
        )
        assert not [no for no in REFUSED if no.matches(asked)]


def test_an_open_column_matches_anything_and_a_named_one_only_itself() -> None:
    no = Refusal(why="w", fix="f", dispatch="deepep", activations=(Activations.PER_TOKEN,))
    assert no.matches(query(dispatch="deepep", runner="reference"))
    assert not no.matches(query(dispatch="deepep", activations=Activations.BF16))
    assert not no.matches(query(dispatch="all_gather"))
    assert not no.matches(query())


def test_several_refusals_are_told_together() -> None:
    with pytest.raises(LaunchErrors) as caught:
        choose(query(runner="cutedsl", dispatch="deepep", wire=Wire.NVFP4))
    assert len(caught.value.errors) == 3


def test_an_absent_row_names_the_nearest_ones() -> None:
    asked = query(runner="nobody's")
    with pytest.raises(Unsupported) as caught:
        choose(asked)
    assert caught.value.why == "the support table has no such row"
    assert caught.value.fix == "nearest rows: runner triton; runner reference"
    assert "nvfp4_online/per_token x nobody's on sm100" in caught.value.what


def test_what_nothing_is_near_to_points_at_the_table() -> None:
    with pytest.raises(Unsupported, match=r"support\.md"):
        choose(query(runner="nobody's", dispatch="nowhere"))


def test_differences_are_named_by_column() -> None:
    row = SUPPORT[0]
    assert query().differs_in(row) == []
    assert query(runner="x", wire=Wire.NVFP4).differs_in(row) == ["runner", "wire"]
    plain = next(row for row in SUPPORT if row.runner == "reference")
    assert query(finalize=Finalize.FUSED).differs_in(plain) == ["finalize"]
    elsewhere = Route(row.activations, row.quantizations, "r", "d", frozenset({Arch.SM90}))
    assert query().differs_in(elsewhere) == ["arch"]


def test_names_are_those_of_the_rows() -> None:
    assert runner_names(SUPPORT) == ("triton", "reference")
    assert dispatch_names(SUPPORT) == ("all_gather",)
    assert {"flashinfer_cutedsl", "cutedsl", "triton"} <= set(runner_names(REFUSED))
    assert {"deepep", "all_to_all"} <= set(dispatch_names(REFUSED))


def test_what_is_only_compiled_is_part_of_what_is_supported() -> None:
    for row in SUPPORT:
        assert row.only_compiled < row.archs


def test_a_refusal_of_some_archs_matches_and_names_them_alone() -> None:
    no = Refusal(why="w", fix="f", runner="r", archs=frozenset({Arch.CPU, Arch.SM80}))
    assert no.matches(query(runner="r", arch=Arch.SM80))
    assert not no.matches(query(runner="r", arch=Arch.SM90))
    assert no.subject == "r on cpu, sm80"
