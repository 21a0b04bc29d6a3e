# SPDX-License-Identifier: Apache-2.0
"""Weights made up by `--load-format dummy`: always the same, of sensible sizes, all there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import CheckpointError, LaunchErrors
from tetrarch.core.progress import NoProgress
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, SeqChunk, Step
from tetrarch.memory.checksum import combine
from tetrarch.models.build import Model, build_model
from tetrarch.models.dummy import make_weights
from tetrarch.models.readback import checksums, read_back
from tetrarch.numerics.contract import Activations, Quantization

HIDDEN, EXPERTS = 128, 16
SIZES = dict(hidden_size=HIDDEN, moe_intermediate_size=64, num_experts=EXPERTS, num_hidden_layers=2)
CONTRACTS = [
    ("none", None),
    ("nvfp4_online", "per_token"),
    ("nvfp4_online", "bf16"),
    ("modelopt_fp4", "per_tensor"),
    ("modelopt_fp4", "per_token"),
    ("modelopt_fp4", "bf16"),
]


@pytest.fixture
def bare(tiny: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """Return a factory of folders that hold config.json alone: family → folder."""

    def make(family: str = "qwen3_moe", **overrides: Any) -> Path:
        tiny.tiny_config(family, **overrides).save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
        return tmp_path

    return make


def made(plan: Any, *, seed: int = 0) -> Model:
    model = build_model(plan)
    make_weights(model, plan.quant, progress=NoProgress(), seed=seed)
    return model


@pytest.mark.parametrize(("quantization", "activations"), CONTRACTS)
def test_every_contract_gets_weights_that_decode_to_the_same_deviation(
    make_plan: Any, bare: Callable[..., Path], quantization: str, activations: str | None
) -> None:
    """Negative control of the seed: another one makes other numbers."""
    plan = make_plan(
        bare(**SIZES),
        quantization=Quantization(quantization),
        activations=activations and Activations(activations),
    )
    model = made(plan)
    for layer in range(2):
        for part, width in (("gate", HIDDEN), ("up", HIDDEN), ("down", 64)):
            for expert in (0, EXPERTS - 1):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                values = read_back(model, name).float()
                assert values.std() * width**0.5 == pytest.approx(1, rel=0.05)
                assert abs(float(values.mean())) < 0.05 * width**-0.5 * 10
    assert checksums(model) == checksums(made(plan))
    assert combine(checksums(model)) != combine(checksums(made(plan, seed=1)))


def test_dense_weights_have_the_deviation_of_their_kind(
    make_plan: Any, bare: Callable[..., Path]
) -> None:
    weights = made(make_plan(bare(**SIZES))).weights
    assert weights["model.norm.weight"].mean() == pytest.approx(1, abs=0.02)
    assert weights["model.norm.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(1, rel=0.02)
    assert weights["lm_head.weight"].std() == pytest.approx(HIDDEN**-0.5, rel=0.02)
    first, second = (weights[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_an_embedding_that_is_the_head_is_a_matrix_like_others(
    make_plan: Any, bare: Callable[..., Path]
) -> None:
    weights = made(make_plan(bare(**SIZES, tie_word_embeddings=True))).weights
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(HIDDEN**-0.5, rel=0.02)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_every_family_starts_from_its_configuration_alone(
    bare: Callable[..., Path], start_rank: Callable[..., Executor], family: str
) -> None:
    """The executor refuses logits that are not finite."""
    rank = start_rank(bare(family), load_format="dummy", quantization="nvfp4_online")
    assert rank.plan.model.tokenizer_path is None
    assert rank.load_report.num_dense == len(rank._model.weights)


def test_tokens_spread_over_the_experts(
    bare: Callable[..., Path],
    start_rank: Callable[..., Executor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No expert gets thrice its share, in any layer."""
    rank = start_rank(bare(**SIZES), load_format="dummy", context_length=256)
    counts: dict[int, Tensor] = {}
    for index, layer in enumerate(rank._model.experts.values()):
        forward = layer.forward

        def spy(
            hidden: Tensor,
            ids: Tensor,
            weights: Tensor,
            *,
            _index: int = index,
            _forward: Callable[..., Tensor] = forward,
        ) -> Tensor:
            counts[_index] = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
            return _forward(hidden, ids, weights)

        monkeypatch.setattr(layer, "forward", spy)
    ids = torch.randint(256, (256,), generator=torch.Generator().manual_seed(0))
    chunk = SeqChunk(
        row=0,
        token_ids=tuple(ids.tolist()),
        start=0,
        pages=tuple(range(64)),
    )
    rank.step(Step(phase=Phase.PREFILL, seqs=(chunk,), rank_tokens=(256,)))
    assert len(counts) == 2
    for count in counts.values():
        assert int(count.max()) < 3 * count.float().mean()


def test_a_dummy_is_updated_from_a_checkpoint_and_never_from_a_folder_without_weights(
    start_rank: Callable[..., Executor], bare: Callable[..., Path], tiny_checkpoint: Any
) -> None:
    real = tiny_checkpoint("qwen3_moe").path
    rank = start_rank(bare("qwen3_moe"), load_format="dummy")
    before = rank.weights.checksums()
    with pytest.raises(CheckpointError, match="no safetensors"):
        rank.weights.plan(rank.plan.model.path, atomic=None)
    assert rank.weights.checksums() == before
    rank.weights.commit(rank.weights.plan(str(real), atomic=None))
    assert rank.weights.checksums() == start_rank(real).weights.checksums()


def test_without_dummy_a_folder_without_weights_is_refused(
    start_rank: Callable[..., Executor], bare: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match="no safetensors"):
        start_rank(bare())
    with pytest.raises(LaunchErrors, match="cannot start from a"):
        start_rank(bare(), quantization="modelopt_fp4", moe_activations="per_token")
