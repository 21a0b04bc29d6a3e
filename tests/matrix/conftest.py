# SPDX-License-Identifier: Apache-2.0
"""Launches on fake hardware, and small engines that live."""

from __future__ import annotations

import importlib.util
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import LaunchErrors
from tetrarch.engine.actions import UpdateFromTensors
from tetrarch.engine.engine import Engine
from tetrarch.engine.loop import EngineLoop
from tetrarch.engine.messages import ControlReply, encode
from tetrarch.engine.request import Delta, GenerateRequest, SamplingParams
from tetrarch.executor.executor import Executor
from tetrarch.executor.weights import WeightStore
from tetrarch.numerics.contract import SourceFormat

FAKES = (Arch.SM80, Arch.SM90, Arch.SM100, Arch.SM103, Arch.SM120, Arch.CPU)


@pytest.fixture(params=FAKES)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Each architecture that their matrix tells apart."""
    return request.param


@pytest.fixture(scope="session")
def device_of() -> Callable[[Arch], Device]:
    """Return a maker of fake devices."""
    return _device


@pytest.fixture(scope="session")
def launch(demo_facts: ModelFacts) -> Callable[..., Plan]:
    """Return a launcher: architecture, source format, settings as keywords → plan."""
    return partial(_launch, demo_facts)


@pytest.fixture(scope="session")
def refused(launch: Callable[..., Plan]) -> Callable[..., list[str]]:
    """Return what a launch is refused for, as text."""

    def run(arch: Arch, source: SourceFormat, **settings: Any) -> list[str]:
        with pytest.raises(LaunchErrors) as caught:
            launch(arch, source, **settings)
        for error in caught.value.errors:
            assert error.why
            assert error.fix
        return [str(error) for error in caught.value.errors]

    return run


def _launch(
    facts: ModelFacts,
    arch: Arch,
    source: SourceFormat,
    *,
    sizes: dict[str, int] | None = None,
    input_scales: bool | None = None,
    **settings: Any,
) -> Plan:
    serialized = source in (SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED)
    checkpoint = Checkpoint(
        path="/m",
        config={},
        source=source,
        label=source.upper(),
        dtype="bfloat16",
        quant_ignore=(),
        has_input_scales=serialized if input_scales is None else input_scales,
        kv_quant=None,
        weights=WeightScan(),
    )
    args = LaunchArgs(**({"model": "m"} | settings))
    return resolve(args, checkpoint, replace(facts, **(sizes or {})), _device(arch))


def _device(arch: Arch) -> Device:
    return Device(
        arch=arch,
        name="fake",
        torch_device="cpu" if arch is Arch.CPU else "cuda",
        num_devices=1,
        memory_bytes=1 << 36,
        physical_cores=8,
    )


class Live:
    """A small engine over a real model, driven turn by turn as its process drives it."""

    def __init__(self, rank: Executor) -> None:
        self.plan, self.rank = rank.plan, rank
        self.engine = Engine(rank.plan, rank)
        self.said: list[Any] = []
        self._inbox: list[bytes] = []
        self._count = 0
        self._loop = EngineLoop(self.engine, self, self.said.extend)

    @property
    def store(self) -> WeightStore:
        return self.rank.weights

    def take(self, timeout: float | None) -> list[bytes]:
        inbox, self._inbox = self._inbox, []
        if timeout and not inbox:
            time.sleep(timeout)
        return inbox

    def send(self, message: Any, *, turns: int = 1) -> None:
        self._inbox.append(encode(message))
        for _ in range(turns):
            self._loop.turn()

    def ask(self, kind: type[Any], **fields: Any) -> ControlReply:
        """Send a control message, and go on until it is answered."""
        self._count += 1
        self.send(kind(ticket=self._count, **fields))
        for _ in range(5000):
            for said in self.said:
                if isinstance(said, ControlReply) and said.ticket == self._count:
                    return said
            self._loop.turn()
        raise AssertionError("never answered")

    def push(self, tensors: Mapping[str, Tensor], **fields: Any) -> ControlReply:
        """Send tensors as a trainer pickles them."""
        data = pickle.dumps(list(tensors.items()))
        return self.ask(UpdateFromTensors, data=data, **fields)

    def request(self, rid: str, *, prompt: tuple[int, ...], count: int) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        return GenerateRequest(
            rid=rid, prompt_ids=prompt, sampling=sampling, return_logprobs=True, logprob_start=0
        )

    def run(self) -> None:
        while self.engine.has_work:
            self._loop.turn()

    def last(self, rid: str) -> Delta:
        return [one for one in self.said if isinstance(one, Delta) and one.rid == rid][-1]

    def say(self) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Greedy tokens of a fixed prompt, and their logprobs."""
        self._count += 1
        rid = f"say {self._count}"
        self.send(self.request(rid, prompt=(5, 3, 8, 200, 17), count=12))
        self.run()
        deltas = [one for one in self.said if isinstance(one, Delta) and one.rid == rid]
        tokens = tuple(token for one in deltas for token in one.token_ids)
        return tokens, tuple(score for one in deltas for score in one.logprobs)

    def answer(
        self, prompts: Sequence[Sequence[int]], *, count: int
    ) -> tuple[list[tuple[int, ...]], float]:
        """Greedy tokens of prompts in one batch, and how many a verification yielded; 0: none."""
        for rid, prompt in enumerate(prompts):
            self.send(self.request(f"answer {rid}", prompt=tuple(prompt), count=count))
        self.run()
        said = [one for one in self.said if isinstance(one, Delta)]
        tokens = [
            tuple(t for one in said if one.rid == f"answer {rid}" for t in one.token_ids)
            for rid in range(len(prompts))
        ]
        counts = [self.last(f"answer {rid}").acceptance for rid in range(len(prompts))]
        known = [one for one in counts if one is not None]
        verifies = sum(one.num_verifies for one in known)
        return tokens, sum(one.num_tokens for one in known) / verifies if verifies else 0.0

    def addresses(self) -> list[dict[str, int]]:
        """Where everything lies that a captured graph may read."""
        model = vars(self.rank)["_model"]
        tables = [model.weights, *(layer.weights for layer in model.experts.values())]
        return [table.addresses() for table in tables]


@pytest.fixture(scope="session")
def live(start_rank: Callable[..., Executor]) -> Callable[..., Live]:
    """Return a starter of engines: `live(checkpoint, **settings)`."""

    def start(path: Path, **settings: Any) -> Live:
        sizes = {"context_length": 128, "chunked_prefill_size": 16}
        return Live(start_rank(path, **{**sizes, **settings}))

    return start


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a writer of a checkpoint's copy whose experts are ModelOpt NVFP4, a draft's not."""
    file = Path(__file__).parents[2] / "tools" / "quantize_checkpoint.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def write(path: Path) -> Path:
        out = tmp_path / f"{path.name} in NVFP4"
        tool.quantize_checkpoint(
            path,
            out,
            "nvfp4_modelopt",
            which=lambda name: tool.EXPERTS(name) and not name.startswith("mtp."),
        )
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["ignore"] = ["mtp*"]
        (out / "config.json").write_text(json.dumps(config))
        return out

    return write
