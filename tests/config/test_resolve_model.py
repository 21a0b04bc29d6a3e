# SPDX-License-Identifier: Apache-2.0
"""Which model, under what name and type, and behind which door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.core.errors import TetrarchError
from tetrarch.numerics.contract import SourceFormat


def why(plan: Plan, field: str) -> str:
    (reason,) = [d.why for d in plan.decisions if d.field == field]
    return reason


def test_the_checkpoint_decides_unless_asked(settle: Callable[..., Plan]) -> None:
    plan = settle(source=SourceFormat.FP16)
    assert (plan.model.dtype, plan.model.context_len) == ("float16", 40960)
    assert plan.model.path == plan.model.tokenizer_path == "/models/some"
    assert plan.model.served_name == "some/model"
    asked = settle(
        source=SourceFormat.FP16,
        dtype="float32",
        context_length=2048,
        tokenizer_path="/t",
        served_model_name="mine",
    )
    assert (asked.model.dtype, asked.model.context_len) == ("float32", 2048)
    assert (asked.model.tokenizer_path, asked.model.served_name) == ("/t", "mine")
    assert why(asked, "dtype") == "asked for"


def test_the_demo_model_has_a_name(settle: Callable[..., Plan]) -> None:
    assert settle(model=None).model.served_name == "tetrarch-demo"


def test_a_context_beyond_the_models_is_refused(
    refusals: Callable[..., list[TetrarchError]],
) -> None:
    (error,) = refusals(context_length=40961)
    assert "40960 positions" in error.why


def test_a_name_with_a_colon_is_refused(refusals: Callable[..., list[TetrarchError]]) -> None:
    (error,) = refusals(served_model_name="base:adapter")
    assert "colon" in error.what


def test_decoding_dense_linears_is_reported_with_its_cost(
    settle: Callable[..., Plan], checkpoint: Callable[..., Checkpoint]
) -> None:
    scan = WeightScan(num_bytes=1, dtype="U8", dense_elements=2 << 30, dense_bytes=1 << 30)
    plan = settle(source=checkpoint(SourceFormat.NVFP4_MODELOPT, weights=scan, label="NVFP4"))
    assert why(plan, "dense_weights") == (
        "linears stored as NVFP4 are decoded while loading: 4.0 GiB instead of 1.0 GiB"
    )
    assert "dense_weights" not in [d.field for d in settle().decisions]


def test_what_is_in_the_checkpoint_and_not_used_is_reported(
    settle: Callable[..., Plan], checkpoint: Callable[..., Checkpoint], facts: ModelFacts
) -> None:
    source = checkpoint(SourceFormat.NVFP4_MODELOPT, kv_quant="FP8")
    plan = settle(source=source, model_facts=replace(facts, num_mtp_layers=1))
    assert "FP8 scales are not used" in why(plan, "kv_cache_dtype")
    assert "speculation is off" in why(plan, "mtp_layers")


def test_an_open_door_is_reported(settle: Callable[..., Plan]) -> None:
    assert "no --api-key" in why(settle(host="0.0.0.0"), "host")
    for quiet in (settle(), settle(host="0.0.0.0", api_key="k")):
        assert "host" not in [d.field for d in quiet.decisions]


def test_the_door_is_as_asked(settle: Callable[..., Plan], tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.touch()
    serve = settle(
        port=1,
        log_level="debug",
        chat_template=str(template),
        incremental_streaming_output=True,
        allow_auto_truncate=True,
        stream_interval=4,
        max_body_bytes=1000,
    ).serve
    assert (serve.host, serve.port, serve.log_level) == ("127.0.0.1", 1, "debug")
    assert serve.chat_template == str(template)
    assert serve.incremental_streaming
    assert serve.allow_auto_truncate
    assert serve.stream_interval == 4
    assert serve.max_body_bytes == 1000


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"chat_template": "/no/such.jinja"}, "no file"), ({"enable_metrics": False}, "always on")],
)
def test_what_cannot_be_is_refused(
    refusals: Callable[..., list[TetrarchError]], setting: dict[str, object], words: str
) -> None:
    (error,) = refusals(**setting)
    assert words in error.what


def test_an_end_token_outside_the_vocabulary_is_refused(
    refusals: Callable[..., list[TetrarchError]],
    settle: Callable[..., Plan],
    checkpoint: Callable[..., Checkpoint],
    facts: ModelFacts,
) -> None:
    last = facts.vocab_size - 1
    assert settle(source=checkpoint(end_ids=frozenset({0, last})))
    (error,) = refusals(source=checkpoint(end_ids=frozenset({0, last + 1})))
    assert str(last + 1) in error.what
    assert "eos_token_id" in error.what


def test_an_update_may_read_any_folder_while_only_this_machine_can_ask(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]], tmp_path: Path
) -> None:
    assert settle().serve.weights_root == "/"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    asked = settle(weights_root=str(link))
    assert asked.serve.weights_root == str(tmp_path.resolve())
    assert why(asked, "weights_root") == "asked for"
    assert settle(host="0.0.0.0", weights_root="/").serve.weights_root == "/"
    (error,) = refusals(weights_root="/no/such/folder")
    assert "--weights-root" in error.what


def test_behind_an_open_door_an_update_reads_what_lies_beside_the_model(
    settle: Callable[..., Plan], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    assert settle(host="0.0.0.0", api_key="k").serve.weights_root == "/models"
    real, link = tmp_path / "real" / "model", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    linked = settle(host="0.0.0.0", source=checkpoint(path=str(link)))
    assert linked.serve.weights_root == str(real.parent.resolve())
    hub = "/hub/models--some--model"
    cached = settle(host="0.0.0.0", source=checkpoint(path=f"{hub}/snapshots/abc"))
    assert cached.serve.weights_root == hub


def test_token_ids_alone_are_served_where_asked(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]]
) -> None:
    plan = settle(skip_tokenizer_init=True)
    assert plan.model.tokenizer_path is None
    assert "token ids only" in why(plan, "tokenizer_path")
    for setting in ("tokenizer_path", "chat_template"):
        (error, *_) = refusals(skip_tokenizer_init=True, **{setting: "/t"})
        assert f"--{setting.replace('_', '-')} has no effect" in error.what


def test_a_dummy_needs_no_tokenizer_and_takes_one(
    settle: Callable[..., Plan], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """Negative control: a real checkpoint without one is refused when it is loaded."""
    source = checkpoint(path=str(tmp_path))
    assert settle(source=source).model.tokenizer_path == str(tmp_path)
    assert settle(source=source, load_format="dummy").model.tokenizer_path is None
    asked = settle(source=source, load_format="dummy", tokenizer_path="/t")
    assert asked.model.tokenizer_path == "/t"
    (tmp_path / "tokenizer_config.json").touch()
    dummy = settle(source=source, load_format="dummy")
    assert (dummy.model.tokenizer_path, dummy.model.load_format) == (str(tmp_path), "dummy")
