# SPDX-License-Identifier: Apache-2.0
"""Ten families equal Hugging Face `generate`, token for token, in mixed paged batches.

The driver serves five sequences at once: prompts are chunked, decodes ride along with chunks,
pages are handed out in shuffled order. FP32, experts unquantized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.config.plan import Plan
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model, build_model
from tetrarch.models.destinations import DenseDestination
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.types import Part

FAMILIES = [
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "minimax_m2",
]
PAGE, CHUNK, NEW_TOKENS = 4, 11, 14
PROMPT_LENS = (3, 17, 9, 1, 24)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def weights_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                yield name, opened.get_tensor(name)


Place = tuple[Part, int]
Served = Callable[..., tuple[Model, list[list[int]]]]


def load(model: Model, plan: Plan, moved: Callable[[Place], Place]) -> None:
    """Copy a checkpoint by the name plan alone, experts' matrices where `moved` says."""
    stagers = {p: ExpertStager(layer.spec, plan.quant) for p, layer in model.experts.items()}
    written: set[str] = set()
    for name, value in weights_of(Path(plan.model.path)):
        place = model.names.resolve(name)
        if isinstance(place, DenseDestination):
            model.weights.write_(place.name, value)
            written.add(place.name)
        elif place is not None:
            put = stagers[place.layer].put_bias if place.bias else stagers[place.layer].put
            for part, expert, one in place.matrices(value):
                put(*moved((part, expert)), one)
    assert written == set(model.weights)
    for path, stager in stagers.items():
        model.experts[path].load(stager.finish(), Journal(keeps=False))


class Server:
    """First come, first served; greedy; pages are handed out shuffled."""

    def __init__(self, model: Model, *, num_pages: int = 128) -> None:
        self.model = model
        self.pool = KVPool(
            model.sites, num_pages, page_size=PAGE, dtype=model.dtype, device=model.device
        )
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        self.free: list[int] = order.tolist()
        self.shapes: list[tuple[int, ...]] = []

    def generate(self, tokens: list[list[int]], count: int) -> list[list[int]]:
        seqs = [list(one) for one in tokens]
        done, pages = [0] * len(seqs), [[] for _ in seqs]
        goal = [len(one) + count for one in seqs]
        while live := [i for i in range(len(seqs)) if len(seqs[i]) < goal[i]]:
            left, chunks = CHUNK, []
            for i in live:
                if (n := min(len(seqs[i]) - done[i], left)) > 0:
                    chunks.append((i, n))
                    left -= n
            logits = self.forward([(seqs[i], done[i], n, pages[i]) for i, n in chunks])
            for (i, n), row in zip(chunks, logits, strict=True):
                done[i] += n
                if done[i] == len(seqs[i]):
                    seqs[i].append(int(row.argmax()))
        return [seq[len(one) :] for seq, one in zip(seqs, tokens, strict=True)]

    def forward(self, chunks: list[tuple[list[int], int, int, list[int]]]) -> torch.Tensor:
        ids, positions, write_at, q_lens, kv_lens = [], [], [], [], []
        for tokens, start, n, pages in chunks:
            while len(pages) * PAGE < start + n:
                pages.append(self.free.pop())
            span = range(start, start + n)
            ids += tokens[start : start + n]
            positions += span
            write_at += [pages[p // PAGE] * PAGE + p % PAGE for p in span]
            q_lens.append(n)
            kv_lens.append(start + n)
        self.shapes.append(tuple(q_lens))
        table = torch.zeros(len(chunks), max(len(c[3]) for c in chunks), dtype=torch.int32)
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk[3])] = torch.tensor(chunk[3])
        ends = torch.tensor(q_lens).cumsum(0)
        inputs = AttentionInputs(
            write_at=torch.tensor(write_at),
            cu_seqlens_q=torch.cat((torch.zeros(1), ends)).int(),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=table,
            q_lens=tuple(q_lens),
            kv_lens_host=tuple(kv_lens),
        )
        return self.model.forward(
            torch.tensor(ids), torch.tensor(positions), inputs, self.pool, ends - 1
        ).logits


@functools.cache
def reference_tokens(reference: torch.nn.Module) -> list[list[int]]:
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            use_cache=True,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="session")
def served(tiny_checkpoint: Callable[..., object], make_plan: Callable[..., Plan]) -> Served:
    """Family → a freshly loaded model and what it should say."""

    def make(
        family: str, moved: Callable[[Place], Place] = lambda place: place
    ) -> tuple[Model, list[list[int]]]:
        checkpoint = tiny_checkpoint(family)
        plan = make_plan(checkpoint.path)
        model = build_model(plan)
        load(model, plan, moved)
        return model, reference_tokens(checkpoint.reference)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_hugging_face(family: str, served: Served) -> None:
    model, want = served(family)
    server = Server(model)
    assert server.generate(prompts(), NEW_TOKENS) == want
    assert any(1 in shape and max(shape) > 1 for shape in server.shapes), "no mixed step"


def without_window(server: Server) -> None:
    for site in server.model.sites:
        vars(server.model.hf.get_submodule(site.name))["sliding_window"] = None


def without_sinks(server: Server) -> None:
    for name, slot in server.model.weights.items():
        if name.endswith(".sinks"):
            slot.fill_(-1e4)


def with_a_stale_page(server: Server) -> None:
    server.free = [page for page in server.free if page % 7 for _ in range(2)]  # each twice


def without_balancing_bias(server: Server) -> None:
    for name, slot in server.model.weights.items():
        if name.endswith("e_score_correction_bias"):
            slot.zero_()


@pytest.mark.parametrize(
    ("family", "harm"),
    [
        ("gpt_oss", without_window),
        ("gpt_oss", without_sinks),
        ("minimax_m2", without_balancing_bias),
        ("qwen3_moe", with_a_stale_page),
        ("deepseek_v3", with_a_stale_page),
    ],
)
def test_a_harmed_model_is_noticed(
    family: str, harm: Callable[[Server], None], served: Served
) -> None:
    model, want = served(family)
    server = Server(model)
    harm(server)
    assert server.generate(prompts(), NEW_TOKENS) != want


def shifted(place: Place) -> Place:
    """One matrix goes to the next expert."""
    return place[0], (place[1] + 1) % 8


def swapped(place: Place) -> Place:
    """Gate and up change places."""
    return {Part.GATE: Part.UP, Part.UP: Part.GATE}.get(place[0], place[0]), place[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("moved", [shifted, swapped])
def test_a_misplaced_expert_is_noticed(
    family: str, moved: Callable[[Place], Place], served: Served
) -> None:
    model, want = served(family, moved)
    assert Server(model).generate(prompts(), NEW_TOKENS) != want
