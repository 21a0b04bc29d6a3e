# SPDX-License-Identifier: Apache-2.0
"""Our own table, cell by cell: every row and every refusal on fake hardware."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import Plan
from tetrarch.config.support import REFUSED, SUPPORT, Finalize, Refusal, Route
from tetrarch.core.errors import LaunchErrors, Unsupported
from tetrarch.numerics.contract import Activations, Quantization, SourceFormat

BF16, NVFP4 = SourceFormat.BF16, SourceFormat.NVFP4_MODELOPT
Refused = Callable[..., list[str]]

ROWS = [(row, quantization) for row in SUPPORT for quantization in row.quantizations]


def source_for(quantization: Quantization) -> SourceFormat:
    return NVFP4 if quantization is Quantization.MODELOPT_FP4 else BF16


@pytest.mark.parametrize("arch", list(Arch))
@pytest.mark.parametrize(
    ("row", "quantization"), ROWS, ids=lambda x: x.runner if isinstance(x, Route) else str(x)
)
def test_every_row_is_chosen_where_it_says(
    launch: Callable[..., Plan],
    refused: Refused,
    row: Route,
    quantization: Quantization,
    arch: Arch,
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
        assert f"{row.runner}" in error


REFUSALS = [
    (no, activations, arch)
    for no in REFUSED
    for activations in no.activations
    for arch in Arch
    if arch in no.archs
]
CONTRACT_OF = {
    Activations.PER_TOKEN: ("nvfp4_online", BF16),
    Activations.PER_TENSOR: ("modelopt_fp4", NVFP4),
    Activations.BF16: ("none", BF16),
}


@pytest.mark.parametrize(
    ("refusal", "activations", "arch"),
    REFUSALS,
    ids=lambda x: x.subject if isinstance(x, Refusal) else str(x),
)
def test_every_refusal_answers_in_its_own_words(
    refused: Refused, refusal: Refusal, activations: Activations, arch: Arch
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


def test_unsupported_is_the_type_of_a_refusal(launch: Callable[..., Plan]) -> None:
    with pytest.raises(LaunchErrors) as caught:
        launch(Arch.SM90, BF16, quantization="nvfp4_online", moe_dispatch="deepep")
    assert isinstance(caught.value.errors[0], Unsupported)
