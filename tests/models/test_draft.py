# SPDX-License-Identifier: Apache-2.0
"""The draft: its formula against Hugging Face's, its place in the model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.commands.arithmetic.problems import Split, eval_split
from tetrarch.config.plan import Plan, SpecPlan
from tetrarch.core.errors import CheckpointError, TetrarchError
from tetrarch.core.progress import NoProgress
from tetrarch.models.build import Model, build_model
from tetrarch.models.draft import DraftHead
from tetrarch.models.load import LoadReport, load_weights
from tetrarch.models.readback import checksums, read_back
from tetrarch.models.report import Unused
from tetrarch.models.skeleton import read_skeleton
from tetrarch.models.sources import SafetensorsSource, Source, TensorSource
from tetrarch.numerics.contract import Quantization
from tolerance import Tolerance, assert_close

Drafted = Callable[..., Path]
MTP = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
BLOCK = "model.layers.4"  # of a draft of four layers, numbered
EXPERTS = "mtp.layers.0.mlp.experts"
FP32_LOGITS = Tolerance(
    rtol=0.0, atol=5e-6, reason="the same FP32 sums in another order, through one layer and a head"
)
TOKENS = torch.tensor([7, 3, 250, 91, 4, 4, 178, 66, 5, 12, 99, 31, 200, 8])


class Run:
    """One sequence in a pool of its own."""

    def __init__(self, model: Model, num_pages: int = 64) -> None:
        self.model = model
        self.pool = KVPool(
            model.sites, num_pages, page_size=16, dtype=model.dtype, device=model.device
        )

    def inputs(self, start: int, count: int) -> AttentionInputs:
        end = start + count
        return AttentionInputs(
            write_at=torch.arange(start, end),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            page_table=torch.arange(-(-end // 16), dtype=torch.int32)[None],
            q_lens=(count,),
            kv_lens_host=(end,),
        )

    def target(self, ids: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(ids))
        found = self.model.forward(
            ids, rows + start, self.inputs(start, len(ids)), self.pool, rows, wants_hidden=True
        )
        assert found.hidden is not None
        return found.logits, found.hidden

    def draft(self, ids: Tensor, hidden: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(ids))
        found = self.model.draft_forward(
            ids, hidden, rows + start, self.inputs(start, len(ids)), self.pool, rows
        )
        assert found.hidden is not None
        return found.logits, found.hidden


@pytest.fixture
def load(make_plan: Callable[..., Plan]) -> Callable[..., tuple[Model, LoadReport, Plan]]:
    def run(
        path: Path, source: Source | None = None, **contract: Any
    ) -> tuple[Model, LoadReport, Plan]:
        plan = replace(make_plan(path, **contract), spec=MTP)
        model, source = build_model(plan), source or SafetensorsSource(path)
        return model, load_weights(model, source, plan=plan.quant, progress=NoProgress()), plan

    return run


def hugging_face(path: Path, ids: Tensor, hidden: Tensor, num_layers: int) -> Tensor:
    """Hugging Face's MTP logits of every row: (T, V)."""
    main = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    main.set_experts_implementation("eager")
    vars(main)["_keys_to_ignore_on_load_unexpected"] = [rf"model\.layers\.{num_layers}.*"]
    theirs = MtpModel.from_pretrained(main).eval()
    cache = MtpCache(config=main.config.get_mtp_config())
    positions = torch.arange(1, len(ids) + 1)[None]
    with torch.no_grad():
        rows = theirs.forward_layer(0, hidden[None], positions, cache, input_ids=ids[None])
        return main.lm_head(rows)[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_head_equals_hugging_faces(
    drafted_checkpoint: Drafted, load: Callable[..., Any], family: str
) -> None:
    path = drafted_checkpoint(family)
    model, _, _ = load(path)
    run = Run(model)
    logits, hidden = run.target(TOKENS)
    following = torch.cat((TOKENS[1:], logits[-1].argmax()[None]))
    want = hugging_face(path, following, hidden, 4)
    assert_close(run.draft(following, hidden)[0], want, FP32_LOGITS)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_rows_in_pieces_and_longer_chains_are_the_same_draft(
    drafted_checkpoint: Drafted, load: Callable[..., Any], family: str
) -> None:
    """The entries of earlier calls are read from the pages, latent ones too."""
    model, _, _ = load(drafted_checkpoint(family))
    whole, pieces = Run(model), Run(model)
    _, hidden = whole.target(TOKENS)
    following = TOKENS.roll(-1)
    want, states = whole.draft(following, hidden)
    first, _ = pieces.draft(following[:9], hidden[:9])
    second, _ = pieces.draft(following[9:], hidden[9:], start=9)
    assert_close(torch.cat((first, second)), want, FP32_LOGITS)
    chained, _ = whole.draft(following[:1], states[-1:], start=len(TOKENS))
    assert not torch.allclose(chained[0], want[-1])


def test_hidden_states_are_those_that_become_logits(
    drafted_checkpoint: Drafted, load: Callable[..., Any]
) -> None:
    model, _, _ = load(drafted_checkpoint("deepseek_v3"))
    logits, hidden = Run(model).target(TOKENS)
    assert torch.equal(model.hf.get_output_embeddings()(hidden), logits)
    rows = torch.arange(len(TOKENS))
    run = Run(model)
    quiet = model.forward(TOKENS, rows, run.inputs(0, len(TOKENS)), run.pool, rows)
    assert quiet.hidden is None
    assert torch.equal(quiet.logits, logits)


def test_a_draft_is_one_more_layer_of_the_model(
    drafted_checkpoint: Drafted,
    load: Callable[..., Any],
    make_plan: Callable[..., Plan],
) -> None:
    path = drafted_checkpoint("deepseek_v3")
    model, report, _ = load(path)
    assert [site.index for site in model.sites] == [0, 1, 2, 3, 4]
    assert model.sites[-1].name == "mtp.layers.0.self_attn"
    assert model.sites[-1].latent
    assert list(model.experts)[-1] == EXPERTS
    assert {"mtp.fc.weight", "mtp.norm.weight"} <= set(model.weights)
    assert not [
        name for name in model.weights if name.startswith("mtp.") and "embed_tokens" in name
    ]
    assert f"{EXPERTS}.down" in checksums(model)
    copies = [f"{BLOCK}.embed_tokens.weight", f"{BLOCK}.shared_head.head.weight"]
    assert list(report.unused[Unused.DRAFT_COPY]) == copies
    off = build_model(make_plan(path))
    assert off.draft is None
    assert len(off.sites) == 4
    with pytest.raises(RuntimeError, match="does not speculate"):
        Run(off).draft(TOKENS, torch.zeros(len(TOKENS), 64))


@pytest.mark.parametrize(
    ("family", "first"), [("glm4_moe", "model.layers.5."), ("qwen3_moe", "mtp.layers.1.")]
)
def test_of_several_draft_layers_the_first_is_loaded_and_the_others_reported(
    drafted_checkpoint: Drafted, load: Callable[..., Any], family: str, first: str
) -> None:
    _, report, _ = load(drafted_checkpoint(family, count=2))
    unused = report.unused[Unused.MTP]
    assert unused
    assert all(name.startswith(first) for name in unused)


def test_without_speculation_a_draft_is_reported_and_not_loaded(
    drafted_checkpoint: Drafted, make_plan: Callable[..., Plan]
) -> None:
    plan = make_plan(drafted_checkpoint("qwen3_moe"))
    source = SafetensorsSource(plan.model.path)
    report = load_weights(build_model(plan), source, plan=plan.quant, progress=NoProgress())
    assert "mtp.fc.weight" in report.unused[Unused.MTP]
    assert Unused.DRAFT_COPY not in report.unused


def test_the_target_keeps_its_head_and_embedding_for_both(
    drafted_checkpoint: Drafted, load: Callable[..., Any]
) -> None:
    """What is written to the target's slots is what the draft reads."""
    model, _, _ = load(drafted_checkpoint("glm4_moe"))
    run = Run(model)
    _, hidden = run.target(TOKENS)
    before, _ = run.draft(TOKENS, hidden)
    model.weights.write_("lm_head.weight", model.weights["lm_head.weight"] * 2)
    torch.testing.assert_close(run.draft(TOKENS, hidden)[0], before * 2)
    model.weights.write_(
        "model.embed_tokens.weight", model.weights["model.embed_tokens.weight"] * 0
    )
    assert not torch.allclose(run.draft(TOKENS, hidden)[0], before * 2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "mtp.fc.weight"),
        (lambda t: t.pop(f"{EXPERTS}.3.up_proj.weight"), f"{EXPERTS}.3.up_proj"),
        (lambda t: t.update({"mtp.strange.weight": torch.ones(1)}), "mtp.strange.weight"),
        (lambda t: t.update({"mtp.norm.weight": torch.ones(3)}), "mtp.norm.weight"),
    ],
)
def test_a_damaged_draft_is_refused_like_a_damaged_layer(
    drafted_checkpoint: Drafted,
    load: Callable[..., Any],
    damage: Callable[[dict[str, Tensor]], object],
    words: str,
) -> None:
    path = drafted_checkpoint("qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(path, TensorSource(tensors))


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.NVFP4_ONLINE])
def test_the_demo_models_draft_foresees_what_comes_next(
    demo_path: Path, load: Callable[..., Any], quantization: Quantization
) -> None:
    """It was trained on such answers: all but a few of the first drafts are right."""
    model, report, _ = load(demo_path, dtype="bfloat16", quantization=quantization)
    assert not report.unused
    tokenizer = Tokenizer.from_file(str(demo_path / "tokenizer.json"))
    right = count = 0
    for problem in itertools.islice(eval_split(Split.TEST), 4):
        start = f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
        num_prompt = len(tokenizer.encode(start).ids)
        ids = torch.tensor(tokenizer.encode(f"{start}{problem.solution}<|im_end|>").ids)
        run = Run(model)
        _, hidden = run.target(ids)
        drafts = run.draft(ids[1:], hidden[:-1])[0].argmax(-1)
        hits = (drafts[:-1] == ids[2:])[num_prompt - 1 :]
        right, count = right + int(hits.sum()), count + len(hits)
    assert right / count > 0.95, f"{right} of {count}"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_a_drafts_weights_are_read_back_by_the_checkpoints_names(
    drafted_checkpoint: Drafted, load: Callable[..., Any], family: str
) -> None:
    path = drafted_checkpoint(family)
    model, _, _ = load(path)
    tensors = load_file(path / "model.safetensors")
    prefix = BLOCK if family == "deepseek_v3" else "mtp.layers.0"
    inside = ("mlp.experts.2.up_proj.weight", "self_attn.o_proj.weight", "mlp.gate.weight")
    for name in (f"{prefix}.{rest}" for rest in inside):
        assert torch.equal(read_back(model, name), tensors[name])


def test_every_family_can_have_a_draft(tiny: ModuleType, tmp_path: Path) -> None:
    for family in tiny.FAMILIES:
        tiny.tiny_config(family).save_pretrained(tmp_path / family)
        plain, drafted = (
            read_skeleton(str(tmp_path / family), dtype=torch.bfloat16, drafts=drafts)
            for drafts in (False, True)
        )
        assert drafted.attention[:-1] == plain.attention
        assert drafted.attention[-1] == replace(
            plain.attention[-1], index=4, name="mtp.layers.0.self_attn"
        )
        assert [site.path for site in drafted.experts[len(plain.experts) :]] == [EXPERTS]


def test_a_draft_that_asks_for_what_we_do_not_honour_is_refused_with_its_target(
    drafted_checkpoint: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe's two tokens go through the draft as well."""

    def masked(self: DraftHead, ids: Tensor, hidden: Tensor, target: Any, **arguments: Any) -> None:
        del ids, target
        self.layers[0].self_attn(
            hidden, position_embeddings=(hidden, hidden), attention_mask=hidden, **arguments
        )

    path = str(drafted_checkpoint("qwen3_moe"))
    monkeypatch.setattr(DraftHead, "forward", masked)
    with pytest.raises(TetrarchError):
        read_skeleton(path, dtype=torch.float32, drafts=True)
    assert read_skeleton(path, dtype=torch.float32).attention
