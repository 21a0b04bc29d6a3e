# SPDX-License-Identifier: Apache-2.0
"""The list of settings, as a whole."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.core.knob import KnobField, knobs

FIELDS = knobs(LaunchArgs)


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LaunchArgs().port = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_default_is_a_value_of_its_own_setting(field: KnobField) -> None:
    assert field.check(field.default, spelling=field.name) == field.default


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_help_is_a_sentence_under_a_known_heading(field: KnobField) -> None:
    assert field.knob.group in GROUPS
    assert field.knob.help[0].isupper()
    assert not field.knob.help.endswith(".")


def test_every_heading_has_settings_and_they_stand_together() -> None:
    order = [field.knob.group for field in FIELDS]
    assert list(dict.fromkeys(order)) == list(GROUPS)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == len(GROUPS) - 1


def test_no_name_belongs_to_two_settings() -> None:
    names = Counter(
        name
        for field in FIELDS
        for name in (field.flag, field.env, *(alias.name for alias in field.knob.also))
    )
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize(
    ("alias", "setting"),
    [
        ("--model-path", "model"),
        ("--moe-runner-backend", "moe_runner"),
        ("--moe-a2a-backend", "moe_dispatch"),
        ("--mem-fraction-static", "kv_cache_fraction"),
        ("--disable-radix-cache", "prefix_cache"),
        ("--disable-overlap-schedule", "overlap_schedule"),
        ("--disable-cuda-graph", "cuda_graphs"),
        ("--cuda-graph-max-bs", "graph_max_batch"),
        ("--tp", "tp_size"),
        ("SGLANG_FP4_IGNORED_LAYERS", "fp4_ignored_layers"),
        ("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "moe_activations"),
        ("SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16", "moe_activations"),
        ("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE", "fused_finalize"),
        ("SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "max_dispatch_tokens"),
        ("SGLANG_MOE_NVFP4_DISPATCH", "moe_wire"),
        ("FLASHINFER_NVFP4_4OVER6", "four_over_six"),
        ("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "four_over_six_e4m3_max"),
        ("OMP_NUM_THREADS", "threads"),
    ],
)
def test_other_engines_names_are_honoured(alias: str, setting: str) -> None:
    (owner,) = [f for f in FIELDS if alias in {each.name for each in f.knob.also}]
    assert owner.name == setting


def test_only_the_keys_are_secret() -> None:
    assert {field.name for field in FIELDS if field.knob.secret} == {"api_key", "admin_api_key"}
