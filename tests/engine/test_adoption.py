# SPDX-License-Identifier: Apache-2.0
"""New weights get a version, and requests live on under them."""

from __future__ import annotations

from typing import Any

from tetrarch.engine.adoption import Adoption
from tetrarch.executor.updates import UpdateReport

PROMPT = tuple(range(20, 33))


def report(num_tensors: int = 3) -> UpdateReport:
    return UpdateReport(atomic=True, num_tensors=num_tensors, num_bytes=12, seconds=0.5, unused={})


def test_updates_are_counted_where_nobody_names_them(bench: Any) -> None:
    adoption = Adoption(bench.engine)
    for version, told in [(None, "1"), ("mine", "mine"), (None, "3")]:
        facts = adoption.adopt(report(), source="disk", version=version, flush=True)
        assert facts["weight_version"] == bench.engine.weight_version == told
        assert (facts["atomic"], facts["seconds"], facts["num_tensors"]) == (True, 0.5, 3)
        assert facts["model_path"] == "nowhere"
    for nothing in (None, report(0)):
        assert (
            adoption.adopt(nothing, source="disk", version="no", flush=True)["weight_version"]
            == "3"
        )


def test_old_keys_go_only_with_a_flush(bench: Any) -> None:
    adoption = Adoption(bench.engine)
    bench.add("a", PROMPT)
    bench.step(3)
    assert adoption.num_held == 1
    assert (
        adoption.adopt(report(), source="tensor", version=None, flush=False)["num_paused_requests"]
        == 1
    )
    assert bench.engine.num_running == 1
    assert (
        adoption.adopt(report(), source="tensor", version=None, flush=True)["num_paused_requests"]
        == 1
    )
    assert bench.engine.num_running == 0
    assert adoption.num_held == 0
    bench.engine.is_paused = True
    assert adoption.num_held == 1


def test_a_name_is_kept_where_none_is_given(bench: Any) -> None:
    adoption = Adoption(bench.engine)
    adoption.rename(None)
    assert adoption.names == {"weight_version": "default", "model_path": "nowhere"}
    adoption.rename("mine")
    assert adoption.names["weight_version"] == "mine"
