# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several rooms share."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedModel

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
