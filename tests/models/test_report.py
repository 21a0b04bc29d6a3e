# SPDX-License-Identifier: Apache-2.0
"""The report says what was read, what decoding cost, and what was left out."""

from __future__ import annotations

from tetrarch.models.names import Ignored
from tetrarch.models.report import Decoded, LoadReport, Unused
from tetrarch.numerics.contract import SourceFormat


def test_the_lines_hold_every_number() -> None:
    report = LoadReport(
        source="/models/x",
        num_tensors=12,
        num_bytes=3 << 20,
        num_dense=5,
        num_expert_matrices=24,
        seconds=1.5,
        formats={"a": SourceFormat.BF16, "b": SourceFormat.BF16, "c": SourceFormat.FP8_BLOCK},
        decoded=(
            Decoded(
                format=SourceFormat.NVFP4_MODELOPT,
                num_weights=4,
                stored_bytes=9 << 10,
                decoded_bytes=32 << 10,
            ),
        ),
        unused={Unused.MTP: ("mtp.fc.weight", "mtp.norm.weight")},
    )
    assert report.lines() == [
        "loaded 12 tensors, 3.0 MiB in 1.5 s (2.0 MiB/s) from /models/x",
        "24 expert matrices (2 layers of bf16, 1 layers of fp8_block), 5 dense weights",
        "4 dense weights stored as nvfp4_modelopt are decoded: 9.0 KiB become 32.0 KiB",
        "not loaded: 2 of kind mtp",
    ]


def test_every_reason_of_the_name_plan_is_a_kind_of_the_report() -> None:
    assert {str(reason) for reason in Ignored} <= {str(kind) for kind in Unused}
