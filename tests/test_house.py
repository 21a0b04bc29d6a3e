# SPDX-License-Identifier: Apache-2.0
"""The house rules that a linter cannot state; a failure names the file, the line and the rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tetrarch.config.support import SUPPORT
from tetrarch.moe.registry import DISPATCHERS, RUNNERS

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tetrarch"
FILES = sorted(SRC.rglob("*.py"))
MAX_FILE, MAX_KERNEL_FILE, MAX_FUNCTION = 300, 450, 50
MIRRORED_FROM = 40  # lines; shorter files are covered through their callers

# Which rooms may import which vendor. Everybody may import torch, msgspec and the standard library.
VENDORS: dict[str, tuple[str, ...]] = {
    "flashinfer": ("kernels/vendor/",),
    "triton": ("kernels/",),
    "cutlass": ("kernels/",),
    "transformers": ("models/", "engine/text.py"),
    "safetensors": ("models/",),
    "huggingface_hub": ("models/",),
    "torch_memory_saver": ("memory/saver.py",),
    "regex": ("engine/patterns.py",),
    "xgrammar": ("engine/grammar.py",),
    "zmq": ("engine/", "serve/"),
    "fastapi": ("serve/",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "prometheus_client": ("serve/",),
    "ray": ("serve/cluster.py",),
    "rich": ("commands/",),
    "matplotlib": ("commands/",),
    "psutil": ("config/hardware.py", "executor/", "engine/process.py"),
}
LAZY_IMPORTS = ("core/registry.py", "config/cli.py", "kernels/vendor/", "__init__.py")


def _name(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0], node.lineno


every_file = pytest.mark.parametrize("path", FILES, ids=_name)


@every_file
def test_files_are_small(path: Path) -> None:
    limit = MAX_KERNEL_FILE if _name(path).startswith("kernels/") else MAX_FILE
    assert len(path.read_text().splitlines()) <= limit


@every_file
def test_functions_are_small(path: Path) -> None:
    if _name(path).startswith("kernels/"):
        return  # a kernel body is one thought
    long = [
        f"{function.name}:{function.lineno}"
        for function in _functions(path)
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION
    ]
    assert not long


@every_file
def test_nobody_probes_our_own_objects(path: Path) -> None:
    """A default in getattr, or hasattr, means that we do not know our own types."""
    probes = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
    ]
    assert not probes, f"{_name(path)}: lines {probes}"


@every_file
def test_imports_stand_at_the_top(path: Path) -> None:
    lazy = [
        node.lineno
        for function in _functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not lazy or _name(path).startswith(LAZY_IMPORTS), f"{_name(path)}: lines {lazy}"


@every_file
def test_each_vendor_stays_in_its_rooms(path: Path) -> None:
    strays = [
        f"{vendor} on line {line}"
        for vendor, line in _imported(path)
        if vendor in VENDORS and not _name(path).startswith(VENDORS[vendor])
    ]
    assert not strays, f"{_name(path)}: {strays}"


@every_file
def test_no_exception_is_swallowed(path: Path) -> None:
    """An empty handler hides a failure; a broad one must at least do something with it."""
    silent = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert not silent, f"{_name(path)}: lines {silent}"


@every_file
def test_every_file_names_its_licence_and_says_what_it_is(path: Path) -> None:
    first = path.read_text().partition("\n")[0]
    assert first == "# SPDX-License-Identifier: Apache-2.0"
    assert ast.get_docstring(_tree(path))


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if len(path.read_text().splitlines()) > MIRRORED_FROM and path.name != "__init__.py"
    ],
    ids=_name,
)
def test_every_source_file_has_a_mirror_test(path: Path) -> None:
    relative = path.relative_to(SRC)
    mirror = ROOT / "tests" / relative.with_name(f"test_{relative.name}")
    assert mirror.exists(), f"write {mirror.relative_to(ROOT)}"


def _modules(folder: str) -> set[str]:
    return {path.stem for path in (SRC / folder).glob("*.py")} - {"__init__"}


def test_table_registry_and_files_agree() -> None:
    """The word in the support table is the registry's name and the file's name."""
    assert {row.runner for row in SUPPORT} == set(RUNNERS) == _modules("moe/runners")
    assert {row.dispatch for row in SUPPORT} == set(DISPATCHERS) == _modules("moe/dispatch")
    for registry in (RUNNERS, DISPATCHERS):
        for name in registry:
            if name != "triton" or find_spec("triton"):  # an optional dependency
                assert callable(registry[name])


def test_every_test_claims_something() -> None:
    """A test without an assertion, a raise check or a helper that checks cannot fail."""
    empty = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(_checks(inner) for inner in ast.walk(node))
    ]
    assert not empty


def _checks(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name.rpartition(".")[2].lstrip("_").startswith(("assert", "raises", "check", "expect"))
