# SPDX-License-Identifier: Apache-2.0
"""An unreadable checkpoint hides nothing that is wrong with the settings, and invents nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.cli import read_keywords
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import ModelFacts
from tetrarch.config.regardless import refused_regardless
from tetrarch.core.errors import CheckpointError, LaunchErrors, Unsupported
from tetrarch.models.describe import describe
from tetrarch.numerics.contract import SourceFormat

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"tp_size": 2}, "--tp-size 2"),
    "graphs": ({"cuda_graphs": "on"}, "--cuda-graphs on"),
    "drafts": (
        {"speculative_algorithm": "mtp", "speculative_num_draft_tokens": 1},
        "--speculative-num-draft-tokens 1 does not go",
    ),
    "draft details": ({"speculative_num_steps": 2}, "without --speculative-algorithm"),
    "a page": ({"max_prefill_tokens": 8}, "page of 16"),
    "two sizes": ({"kv_cache_bytes": 1 << 30, "kv_cache_fraction": 0.5}, "--kv-cache-bytes"),
    "a name": ({"served_model_name": "a:b"}, "colon"),
    "a template": ({"chat_template": "/no/such.jinja"}, "--chat-template"),
    "metrics": ({"enable_metrics": False}, "--no-enable-metrics"),
    "a runner": ({"moe_runner": "marlin"}, "marlin"),
    "a dispatcher": ({"moe_dispatch": "mori"}, "mori"),
    "a finalize": ({"fused_finalize": True}, "fused finalize"),
    "a dispatch limit": ({"max_dispatch_tokens": 64}, "--max-dispatch-tokens"),
    "no contract": (
        {"quantization": "none", "moe_activations": "per_token"},
        "none with --moe-activations per_token is not a contract",
    ),
    "four over six": ({"four_over_six_e4m3_max": "256"}, "--four-over-six-* has no effect"),
    "a factor": (
        {"quantization": "nvfp4_online", "four_over_six": True, "fc2_input_scale": 1.0},
        "--fc2-input-scale 1 does not go",
    ),
    "a pattern": ({"quantization": "nvfp4_online", "fp4_ignored_layers": ["re:("]}, "'re:('"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("model", ["/no/such", "damaged", "not served"])
def test_a_refused_checkpoint_does_not_hide_a_refused_setting(
    machine: Callable[..., Device], folder: Callable[..., Path], model: str, case: str
) -> None:
    settings, words = WRONG[case]
    if model != "/no/such":
        model = str(folder(config={"model_type": "llama"} if model == "not served" else "{"))
    reading = read_keywords({"model": model, **settings}, {})
    with pytest.raises(LaunchErrors) as caught:
        plan_launch(reading, describe=describe, device=machine())
    first, second = caught.value.errors
    assert isinstance(first, CheckpointError)
    assert words in second.what


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context_length": 1 << 20},
        {"moe_activations": "per_token"},  # right for serialized NVFP4
        {"quantization": "modelopt_fp4", "moe_activations": "per_token"},
        {"quantization": "none"},
        {"moe_activations": "per_token", "fc2_input_scale": 1.0},
        {"decoded_cache": "on"},
        {"fp4_ignored_layers": ("layers.3",)},
        {"chunked_prefill_size": -1, "page_size": 64},
        {"moe_runner": "reference", "moe_dispatch": "all_gather"},
    ],
)
def test_what_some_checkpoint_makes_right_is_not_refused(settings: dict[str, Any]) -> None:
    assert refused_regardless(LaunchArgs(model="a/b", **settings)) == []


def test_what_is_known_counts(
    checkpoint: Callable[..., Checkpoint], facts: ModelFacts, machine: Callable[..., Device]
) -> None:
    plain, packed = checkpoint(), checkpoint(SourceFormat.NVFP4_MODELOPT)
    args = LaunchArgs(model="a/b", quantization="nvfp4_online")
    assert refused_regardless(args, checkpoint=plain) == []
    (error,) = refused_regardless(args, checkpoint=packed)
    assert "cannot start from" in error.what
    args = LaunchArgs(model="a/b", context_length=1 << 20)
    (error,) = refused_regardless(args, facts=facts)
    assert "--context-length" in error.what
    args = LaunchArgs(model="a/b", moe_dispatch="deepep", moe_activations="per_token")
    (error,) = refused_regardless(args, device=machine(Arch.SM90))
    assert isinstance(error, Unsupported)
    assert "one FP32 scale per token" in error.why
    assert str(Arch.SM90) in error.what


def test_a_device_that_is_not_there_does_not_hide_a_refused_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LaunchErrors) as caught:
        plan_launch(read_keywords({"device": "cuda", "tp_size": 2}, {}), describe=describe)
    assert [
        "cuda" in caught.value.errors[0].what,
        "--tp-size 2" in caught.value.errors[1].what,
    ] == [
        True,
        True,
    ]
    assert len(caught.value.errors) == 2
