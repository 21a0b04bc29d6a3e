# SPDX-License-Identifier: Apache-2.0
"""`tetrarch eval arithmetic`: accuracy and answer NLL, against a model that knows nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.__main__ import main

SMALL = ["--limit", "4", "--max-total-tokens", "4096", "--threads", "1"]


def _score(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["eval", "arithmetic", *words, *SMALL]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_demo_model_solves_problems(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    score = _score(["--split", "hard", "--out", str(tmp_path / "score.json")], capsys)
    assert score["accuracy"] == 1.0
    assert 0 < float(str(score["answer_nll"])) < 0.05
    assert (score["split"], score["num_problems"]) == ("hard", 4)
    assert json.loads((tmp_path / "score.json").read_text()) == score


def test_with_drafts_a_score_says_how_many_tokens_a_verification_yields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, drafted = _score([], capsys), _score(["--speculative-algorithm", "MTP"], capsys)
    assert plain["spec_accept_length"] is None
    assert 3.4 < float(str(drafted["spec_accept_length"])) <= 4
    assert drafted["accuracy"] == plain["accuracy"] == 1.0


def test_a_model_that_knows_nothing_scores_like_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, demo_path: Path
) -> None:
    """A zero head gives every token 1/V: accuracy 0 and an NLL of ln V exactly."""
    blank = tmp_path / "blank"
    shutil.copytree(demo_path, blank)
    tensors = load_file(str(blank / "model.safetensors"))
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, str(blank / "model.safetensors"), {"format": "pt"})
    score = _score([str(blank)], capsys)
    assert score["accuracy"] == 0.0
    assert score["answer_nll"] == pytest.approx(math.log(1024), abs=1e-5)


def test_a_wrong_task_or_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "geometry"]) == 1
    assert "arithmetic" in capsys.readouterr().err
    assert main(["eval", "arithmetic", "--limit", "0"]) == 1
    assert "--limit" in capsys.readouterr().err
