# SPDX-License-Identifier: Apache-2.0
"""The words for updates; what they do is in test_weights.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tetrarch.executor.updates import Session, WeightsState
from tetrarch.memory.journal import Journal
from tetrarch.models.report import Unused
from tetrarch.models.update import LiveUpdate
from tetrarch.numerics.contract import Quantization


def test_all_states_but_one_are_codes_of_a_503() -> None:
    assert {state.value for state in WeightsState} == {
        "ready",
        "weights_released",
        "weights_not_loaded",
        "weights_inconsistent",
    }


@pytest.mark.parametrize("keeps", [True, False])
def test_a_session_reports_what_its_update_took(
    keeps: bool, tiny_checkpoint: Callable[..., Any], start: Callable[..., Any]
) -> None:
    executor = start(tiny_checkpoint("qwen3_moe", num_hidden_layers=1, num_experts=2).path)
    model, plan = vars(executor)["_model"], executor.plan
    journal = Journal(keeps=keeps)
    session = Session(LiveUpdate(model, plan.quant, journal), journal)
    assert plan.quant.contract.quantization is Quantization.NVFP4_ONLINE
    norm = model.weights["model.norm.weight"].clone()
    pieces = session.update.check({"model.norm.weight": norm})
    session.update.stage(pieces)
    session.update.commit(pieces)
    report = session.report()
    assert (report.atomic, session.is_atomic) == (keeps, keeps)
    assert (report.num_tensors, report.num_bytes) == (1, norm.nbytes)
    assert report.seconds > 0
    assert report.load is None
    assert not report.unused


def test_a_session_tells_what_was_left_out_and_does_not_count_it(
    tiny_checkpoint: Callable[..., Any], start: Callable[..., Any]
) -> None:
    executor = start(tiny_checkpoint("qwen3_moe", num_hidden_layers=1, num_experts=2).path)
    store, norm = executor.weights, "model.norm.weight"
    tensors = {norm: store.value(norm), "mtp.fc.weight": torch.ones(2), "k.k_scale": torch.ones(1)}
    store.take(store.receive(tensors))
    report = store.finish()
    assert report is not None
    assert (report.num_tensors, report.num_bytes) == (1, tensors[norm].nbytes)
    assert report.unused == {Unused.MTP: ("mtp.fc.weight",), Unused.KV_SCALE: ("k.k_scale",)}
