# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced under captured graphs: the same weights give the same bits, others do not.

Memory that anybody gave back is filled with NaN: a replay that read an old address would show it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.executor.executor import KV_RELEASED, READY, Executor
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step
from tetrarch.memory.slots import Region
from tetrarch.models.describe import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GREEDY = SampleSpec(temperature=0.0, top_logprobs=2)
PROMPTS = [[301, 201, 465, 325, 223], [301, 835, 316, 422], [7, 9, 11, 13, 15, 17, 19]]
Said = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def folders(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model, and one whose weights are a tenth others."""
    other = tmp_path_factory.mktemp("other") / "demo"
    shutil.copytree(demo_path, other)
    generator = torch.Generator().manual_seed(0)
    values = {
        name: (value * (1 + 0.1 * torch.randn(value.shape, generator=generator))).to(value.dtype)
        for name, value in load_file(demo_path / "model.safetensors").items()
    }
    save_file(values, other / "model.safetensors", metadata={"format": "pt"})
    return demo_path, other


def start(path: Path, *, saver: bool, backup: bool = False) -> Executor:
    args = LaunchArgs(
        model=str(path),
        device="cuda",
        quantization="nvfp4_online",
        context_length=256,
        max_running_requests=8,
        max_total_tokens=4096,
        enable_memory_saver=saver,
        enable_weights_cpu_backup=backup,
    )
    facts = describe(str(path))
    return Executor(resolve(args, read_checkpoint(str(path)), facts, detect("cuda")))


@pytest.fixture(scope="module")
def executor(folders: tuple[Path, Path]) -> Executor:
    """With graphs."""
    return start(folders[0], saver=False)


@pytest.fixture(scope="module")
def lender(folders: tuple[Path, Path]) -> Executor:
    """With graphs, and with memory that can be released."""
    pytest.importorskip("torch_memory_saver", reason="pip install tetrarch[memory-saver]")
    return start(folders[0], saver=True)


def poison() -> None:
    """Fill with NaN all that torch's allocator has of memory that nobody uses."""
    held: list[torch.Tensor] = []
    reserved = torch.cuda.memory_reserved()
    for size in (1 << 27, 1 << 24, 1 << 21, 1 << 16, 1 << 12):
        while torch.cuda.memory_reserved() == reserved:
            held.append(torch.full((size,), torch.nan, device="cuda"))
        del held[-1]  # that one was new
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
    torch.cuda.synchronize()


def say(executor: Executor) -> Said:
    """Return 12 greedy tokens and their logprobs for each prompt, decoded together in graphs."""
    said: Said = [[] for _ in PROMPTS]
    done = [0] * len(PROMPTS)
    before = executor._graphs.num_replays
    for turn in range(12):
        seqs = tuple(
            SeqChunk(
                row=row,
                token_ids=tuple(prompt) if turn == 0 else (said[row][-1][0],),
                start=done[row],
                pages=(2 * row, 2 * row + 1),
                samples=(GREEDY,),
            )
            for row, prompt in enumerate(PROMPTS)
        )
        count = sum(len(seq.token_ids) for seq in seqs)
        step = Step(phase=Phase.DECODE, seqs=seqs, rank_tokens=(count,))
        for row, result in enumerate(executor.step(step).seqs):
            done[row] += len(seqs[row].token_ids)
            said[row].append((result.token_ids[0], result.logprobs[0].logprob))
    assert executor._graphs.num_replays == before + 12
    return said


def update(executor: Executor, path: Path) -> None:
    executor.weights.commit(executor.weights.plan(str(path), atomic=None))
    poison()


def test_there_and_back_again_gives_the_same_bits(
    executor: Executor, folders: tuple[Path, Path]
) -> None:
    first, other = folders
    a = say(executor)
    update(executor, first)
    assert say(executor) == a
    update(executor, other)
    b = say(executor)
    assert b != a
    update(executor, first)
    assert say(executor) == a
    assert say(start(other, saver=False)) == b, "as if it had been started with them"


@pytest.mark.parametrize("order", ["all at once", "weights first"])
def test_release_resume_reload_gives_the_same_bits(
    lender: Executor, folders: tuple[Path, Path], order: str
) -> None:
    """The loop of a trainer: everything is released, weights come back, then the rest."""
    a = say(lender)
    free = torch.cuda.mem_get_info()[0]
    lender.release(list(Region), backup=False)
    assert torch.cuda.mem_get_info()[0] > free, "somebody else can have it"
    held = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del held
    torch.cuda.empty_cache()
    if order == "all at once":
        lender.resume(list(Region))
    else:
        lender.resume([Region.WEIGHTS])
        assert lender.state == "weights_not_loaded"
    update(lender, folders[0])
    if order == "weights first":
        assert lender.state == KV_RELEASED
        lender.resume([Region.KV_CACHE, Region.GRAPHS])
    assert lender.state == READY
    assert say(lender) == a


def test_without_graphs_memory_a_step_runs_as_it_is(lender: Executor) -> None:
    a = say(lender)
    lender.release([Region.GRAPHS], backup=False)
    before = lender._graphs.num_replays
    seq = SeqChunk(row=0, token_ids=(5,), start=0, pages=(0,), samples=(GREEDY,))
    lender.step(Step(phase=Phase.DECODE, seqs=(seq,), rank_tokens=(1,)))
    assert lender._graphs.num_replays == before
    lender.resume([Region.GRAPHS])
    assert say(lender) == a
