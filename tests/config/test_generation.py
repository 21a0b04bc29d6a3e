# SPDX-License-Identifier: Apache-2.0
"""A chat that says nothing samples as the model's generation config does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tetrarch.config.cli import read_keywords
from tetrarch.config.generation import read_chat_defaults
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import ModelFacts
from tetrarch.core.errors import CheckpointError, LaunchErrors


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"top_k": 0, "eos_token_id": [1, 2], "min_p": 0.1}, {"min_p": 0.1}),
        ({}, {}),
    ],
)
def test_sampling_fields_are_read_and_others_are_not(
    tmp_path: Path, config: dict[str, object], expected: dict[str, object]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_chat_defaults(tmp_path) == expected


def test_no_file_means_no_defaults(tmp_path: Path) -> None:
    assert read_chat_defaults(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", '{"temperature": "hot"}', "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="generation_config"):
        read_chat_defaults(tmp_path)


def test_every_command_refuses_what_serving_could_not_sample_by(
    tmp_path: Path, demo_path: Path, demo_facts: ModelFacts
) -> None:
    for file in demo_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    reading = read_keywords({"model": str(tmp_path)}, environ={})
    assert plan_launch(reading, describe=lambda _: demo_facts).model.path == str(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(LaunchErrors) as caught:
        plan_launch(reading, describe=lambda _: demo_facts)
    [error] = caught.value.errors
    assert isinstance(error, CheckpointError)
    assert "generation_config.json" in error.what
    assert "$.temperature" in error.why
