# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several rooms share."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedModel

from tetrarch.config.cli import read_keywords
from tetrarch.config.hardware import Arch, Device, detect
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import (
    ExpertPlan,
    GraphPlan,
    MemoryPlan,
    ModelFacts,
    ModelPlan,
    ParallelPlan,
    Plan,
    QuantPlan,
    SchedulePlan,
    ServePlan,
    TokenBudget,
)
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.executor.executor import Executor
from tetrarch.models.describe import describe
from tetrarch.numerics.contract import (
    Activations,
    Quantization,
    Recipe,
    SourceFormat,
    contract_for,
)

TOOLS = Path(__file__).parents[1] / "tools"


@dataclass(frozen=True)
class TinyCheckpoint:
    """A random checkpoint of one family and the Hugging Face model that wrote it (FP32, eager)."""

    path: Path
    reference: PreTrainedModel


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo checkpoint that ships with the package."""
    return Path(str(resources.files("tetrarch") / "demo_model"))


@pytest.fixture(scope="session")
def demo_facts(demo_path: Path) -> ModelFacts:
    """What is counted in the demo model."""
    return describe(str(demo_path))


@pytest.fixture(scope="session")
def golden() -> Path:
    """Vectors computed by other projects' code; provenance in golden/README.md."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """`tools/make_tiny_checkpoint.py` as a module."""
    spec = importlib.util.spec_from_file_location(
        "make_tiny_checkpoint", TOOLS / "make_tiny_checkpoint.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TinyCheckpoint]:
    """Return a cached factory: family name, seed, config overrides → checkpoint folder and model.

    Treat the model as read-only: every test of the session shares it.
    """

    @functools.cache
    def make(family: str, *, seed: int = 0, **overrides: object) -> TinyCheckpoint:
        model = tiny.tiny_model(family, seed=seed, **overrides)
        folder = tmp_path_factory.mktemp(family)
        tiny.write_tiny_checkpoint(model, folder)
        return TinyCheckpoint(folder, model)

    return make


@pytest.fixture(scope="session")
def drafted_checkpoint(
    tiny: ModuleType,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """Return a factory: family, number of draft layers, seed → folder of one's own, with drafts."""

    def make(family: str, count: int = 1, *, seed: int = 0, **overrides: object) -> Path:
        folder = tmp_path_factory.mktemp("drafted") / family
        shutil.copytree(tiny_checkpoint(family, seed=seed, **overrides).path, folder)
        tiny.add_draft_layers(folder, count=count, seed=seed)
        return folder

    return make


@pytest.fixture(scope="session")
def start_rank() -> Callable[..., Executor]:
    """Return `start_rank(checkpoint, **settings)`: a small executor of a resolved plan, loaded."""
    return _start_rank


def _start_rank(path: Path, *, device: str = "cpu", **settings: Any) -> Executor:
    small = {
        "quantization": "nvfp4_online",
        "dtype": "float32",
        "context_length": 64,
        "max_running_requests": 4,
        "max_total_tokens": 512,
        "page_size": 4,
        "threads": 1,
    }
    reading = read_keywords({"model": path, **small, **settings}, {})
    return Executor(plan_launch(reading, describe=describe, device=detect(device)))


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Return a factory of one-rank CPU plans: checkpoint folder, dtype, contract → plan.

    They are written by hand, so that tests hold whatever `resolve` decides. A part as a keyword
    replaces fields of it: `make_plan(path, memory={"page_size": 8})`.
    """
    return _make_plan


def _make_plan(
    path: Path,
    *,
    dtype: str = "float32",
    quantization: Quantization = Quantization.NONE,
    activations: Activations | None = None,
    ignored_layers: tuple[str, ...] = (),
    source: SourceFormat = SourceFormat.FP32,
    decoded_cache: bool = True,
    **parts: Mapping[str, Any],
) -> Plan:
    contract = contract_for(quantization, activations)
    assert contract is not None
    facts = describe(str(path))
    fits = (row for row in SUPPORT if row.activations is contract.activations)
    route = next(row for row in fits if Arch.CPU in row.archs)
    plan = Plan(
        model=ModelPlan(
            path=str(path),
            tokenizer_path=str(path),
            served_name=path.name,
            dtype=dtype,
            context_len=facts.context_len,
            facts=facts,
        ),
        quant=QuantPlan(
            contract=contract,
            source=source,
            ignored_layers=ignored_layers,
            weight_recipe=Recipe(448, "mse", half_error=True),
            activation_recipe=None,
            fc2_input_scale=1 / 2688,
        ),
        parallel=ParallelPlan(1, 1, 1),
        experts=ExpertPlan(
            route=route,
            finalize=Finalize.SEPARATE,
            budget=TokenBudget(per_rank=512, rows=512, term="the test's own limit"),
            decoded_cache=decoded_cache,
        ),
        spec=None,
        graphs=GraphPlan(0, 0),
        memory=MemoryPlan(page_size=16, max_total_tokens=4096, kv_bytes=None, fraction=0.5),
        schedule=SchedulePlan(
            max_running_requests=16,
            max_prefill_tokens=512,
            chunk_tokens=128,
            mixed_chunk=True,
            prefix_cache=True,
        ),
        serve=ServePlan(
            host="127.0.0.1",
            port=0,
            api_key=None,
            admin_api_key=None,
            chat_template=None,
            log_level="info",
            incremental_streaming=False,
            allow_auto_truncate=False,
            stream_interval=1,
            max_body_bytes=1 << 26,
        ),
        device=Device(
            arch=Arch.CPU,
            name="cpu",
            torch_device="cpu",
            num_devices=1,
            memory_bytes=1 << 33,
            physical_cores=1,
        ),
        attention="torch",
        deterministic=False,
        num_threads=1,
        process_env=(),
        decisions=(),
    )
    return replace(
        plan, **{part: replace(getattr(plan, part), **new) for part, new in parts.items()}
    )


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Undo what a command does to our logger: pytest listens through the root."""
    root = logging.getLogger("tetrarch")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before[0], before[1], before[2]
