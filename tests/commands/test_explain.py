# SPDX-License-Identifier: Apache-2.0
"""A launch is explained line by line, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tetrarch.commands.explain import render, run
from tetrarch.commands.words import read
from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.config.cli import read_keywords
from tetrarch.config.launch import plan_launch
from tetrarch.core.errors import LaunchErrors
from tetrarch.core.knob import knobs
from tetrarch.models.describe import describe


def explained(**keywords: object) -> dict[str, str]:
    """Return what `explain` says of each name: value and reason."""
    reading = read_keywords({"device": "cpu", **keywords}, {})
    text = render(plan_launch(reading, describe=describe), reading.args)
    rows = [line.split(None, 1) for line in text.splitlines() if line.startswith("  ")]
    return {row[0]: row[1] for row in rows}


def test_every_setting_has_one_line_with_a_reason() -> None:
    lines = explained()
    for field in knobs(LaunchArgs):
        assert len(lines[field.name].split()) >= 2, field.name
        assert not lines[field.name].startswith("auto"), field.name


def test_reasons_tell_asked_for_from_default() -> None:
    lines = explained(port=1234, page_size=32)
    assert lines["port"].split() == ["1234", "asked", "for"]
    assert lines["page_size"].split() == ["32", "asked", "for"]
    assert lines["host"].split() == ["127.0.0.1", "default"]


def test_secrets_are_masked() -> None:
    lines = explained(api_key="sesame")
    assert lines["api_key"].split() == ["***", "asked", "for"]
    assert "sesame" not in "".join(lines.values())


def test_memory_is_estimated_by_kind() -> None:
    reading = read_keywords({"device": "cpu", "threads": 3}, {})
    text = render(plan_launch(reading, describe=describe), reading.args)
    for part in ("dense weights", "expert weights", "decoded experts", "kv cache, a token"):
        assert part in text
    assert "OMP_NUM_THREADS                3 " in text


def test_it_runs_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRARCH_PAGE_SIZE", "64")
    assert run(read("explain", ["--device", "cpu"])) == 0
    out = capsys.readouterr().out
    assert all(f"\n{group}\n" in f"\n{out}" for group in GROUPS)
    assert "nvfp4_online" in out
    assert "page_size                      64 " in out


def test_no_weight_is_needed(demo_path: Path, tmp_path: Path) -> None:
    """A folder that holds nothing but config.json is explained."""
    shutil.copy(demo_path / "config.json", tmp_path)
    assert explained(model=tmp_path)["quantization"].startswith("none")


def test_the_cost_of_decoding_fp8_is_explained(demo_path: Path, tmp_path: Path) -> None:
    config = json.loads((demo_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "9.0 MiB instead of 4.5 MiB" in explained(model=tmp_path)["expert_weights"]
    assert "quantization" in explained(model=tmp_path, quantization="nvfp4_online")


def test_a_launch_that_would_fail_is_not_explained() -> None:
    with pytest.raises(LaunchErrors) as caught:
        run(read("explain", ["--device", "cpu", "--moe-dispatch", "deepep", "--port", "x"]))
    assert len(caught.value.errors) == 2
