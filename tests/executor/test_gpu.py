# SPDX-License-Identifier: Apache-2.0
"""The whole model on a GPU: the demo model says what it says on the CPU, under every contract."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tetrarch.commands.arithmetic.problems import Split, eval_split
from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.core.units import ceil_div
from tetrarch.engine.text import load_tokenizer
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, PromptScoring, SeqChunk, Step
from tetrarch.models.describe import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
Serve = Callable[..., list[list[int]]]
NUM_NEW = 48
# Quantization, and activations: every contract that a checkpoint of BF16 or of NVFP4 is served by.
CONTRACTS = [
    ("none", "auto"),
    ("nvfp4_online", "per_token"),
    ("nvfp4_online", "bf16"),
    ("modelopt_fp4", "per_token"),
    ("modelopt_fp4", "per_tensor"),
    ("modelopt_fp4", "bf16"),
]


@pytest.fixture(scope="module")
def serialized(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with NVFP4 experts, and its draft's as they were."""
    file = Path(__file__).parents[2] / "tools" / "quantize_checkpoint.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("serialized") / "demo"
    tool.quantize_checkpoint(demo_path, out, "nvfp4_modelopt", which=tool.EXPERTS)
    return out


@pytest.fixture(scope="module")
def start(demo_path: Path, serialized: Path) -> Callable[..., Executor]:
    """Return `start(device, quantization, activations, **settings)`."""

    def run(device: str, quantization: str, activations: str, **settings: Any) -> Executor:
        path = str(serialized if quantization == "modelopt_fp4" else demo_path)
        small = {"context_length": 512, "max_running_requests": 8, "max_total_tokens": 4096}
        args = LaunchArgs(
            model=path,
            quantization=quantization,
            moe_activations=activations,
            device=device,
            **{**small, **settings},
        )
        return Executor(resolve(args, read_checkpoint(path), describe(path), detect(device)))

    return run


@pytest.fixture(scope="module")
def prompts(demo_path: Path) -> list[list[int]]:
    """Word problems that the demo model was trained on the like of."""
    tokenizer = load_tokenizer(str(demo_path))
    problems = islice(eval_split(Split.TEST), 8)
    return [
        tokenizer.encode_chat([{"role": "user", "content": problem.question}])
        for problem in problems
    ]


def score(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """Return the logprob of every token but the first, as a prompt."""
    targets = tuple(tokens[1:])
    seq = SeqChunk(
        row=0,
        token_ids=tuple(tokens[:-1]),
        start=0,
        pages=tuple(range(ceil_div(len(tokens), executor.capacity.page_size))),
        scoring=PromptScoring(first=0, targets=targets),
    )
    step = Step(phase=Phase.PREFILL, seqs=(seq,), rank_tokens=(len(targets),))
    return torch.tensor([one.logprob for one in executor.step(step).seqs[0].prompt_logprobs])


@pytest.mark.parametrize("contract", CONTRACTS, ids="-".join)
def test_the_demo_model_says_on_a_gpu_what_it_says_on_the_cpu(
    start: Callable[..., Executor],
    serve: Serve,
    prompts: list[list[int]],
    contract: tuple[str, str],
) -> None:
    """Greedily, in a mixed batch of chunks and decodes.

    The products of another machine round otherwise, and a near-tie parts two texts; where inputs
    are rounded to four bits, the last bit of a BF16 number may move one by half its size. The
    serialized checkpoint's static scale is a bad one: its text is noise, and parts early.
    """
    cpu, gpu = start("cpu", *contract), start("cuda", *contract)
    assert (gpu.plan.attention, gpu.plan.experts.route.runner) == ("triton", "triton")
    want = serve(cpu, prompts, num_new=NUM_NEW, chunk_tokens=64)
    got = serve(gpu, prompts, num_new=NUM_NEW, chunk_tokens=64)
    same = [ours == theirs for ours, theirs in zip(got, want, strict=True)]
    gaps = torch.cat([
        score(gpu, prompt + text) - score(cpu, prompt + text)
        for prompt, text in zip(prompts, want, strict=True)
    ]).abs()  # fmt: skip
    found = f"{sum(same)} of 8 texts, mean gap {gaps.mean():.4f}, most {gaps.max():.3f}"
    rounds = contract[1] in ("per_token", "per_tensor")
    assert sum(same) >= (4 if rounds else 7), found
    assert gaps.mean() < (0.2 if contract[1] == "per_tensor" else 0.02), found


def test_the_triton_runner_says_what_the_reference_says_beside_it(
    start: Callable[..., Executor], serve: Serve, prompts: list[list[int]]
) -> None:
    """Both on the GPU: what differs is the experts alone; attention by torch, too."""
    ours = start("cuda", "nvfp4_online", "per_token")
    theirs = start(
        "cuda", "nvfp4_online", "per_token", moe_runner="reference", attention_backend="torch"
    )
    want = serve(theirs, prompts, num_new=NUM_NEW, chunk_tokens=64)
    got = serve(ours, prompts, num_new=NUM_NEW, chunk_tokens=64)
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= 4


@pytest.mark.parametrize("contract", [CONTRACTS[0], CONTRACTS[1]], ids="-".join)
@pytest.mark.parametrize("count", [1, 5, 8])
def test_graphs_say_what_plain_steps_say(
    start: Callable[..., Executor],
    serve: Serve,
    prompts: list[list[int]],
    contract: tuple[str, str],
    count: int,
) -> None:
    """In full buckets and in padded ones, whose products may round a row otherwise."""
    graphs, plain = start("cuda", *contract), start("cuda", *contract, cuda_graphs="off")
    want = serve(plain, prompts[:count], num_new=NUM_NEW, chunk_tokens=512)
    got = serve(graphs, prompts[:count], num_new=NUM_NEW, chunk_tokens=512)
    assert graphs._graphs.num_replays >= NUM_NEW - 1
    assert plain._graphs.num_replays == 0
    same = [ours == theirs for ours, theirs in zip(got, want, strict=True)]
    assert sum(same) >= count - (count > 1), same


def test_a_batch_says_what_each_says_alone(
    start: Callable[..., Executor], serve: Serve, prompts: list[list[int]]
) -> None:
    """Buckets of another size, prompts of another batch."""
    executor = start("cuda", "nvfp4_online", "bf16")
    together = serve(executor, prompts, num_new=NUM_NEW, chunk_tokens=512)
    alone = [serve(executor, [one], num_new=NUM_NEW, chunk_tokens=512)[0] for one in prompts]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 7
