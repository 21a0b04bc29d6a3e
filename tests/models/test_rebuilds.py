# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing.connection
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tetrarch.core.errors import RequestError
from tetrarch.models.borrowed import View
from tetrarch.models.rebuilds import Rebuilds


class Call:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


def read(value: object) -> object:
    payload = pickle.dumps(value)
    return Rebuilds(len(payload)).read(payload)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Name of 24 bytes of shared memory."""
    monkeypatch.setattr("tetrarch.models.shared_file._SHARED", tmp_path)
    (tmp_path / "torch_1_2_0").write_bytes(bytes(64 + 24))
    return b"/torch_1_2_0"


LIES: dict[str, dict[str, object]] = {
    "a byte more": {"size": 25},
    "huge": {"size": 2**61},
    "negative": {"size": -1},
    "text": {"size": "24"},
    "another file": {"handle": b"/torch_1_2_3"},
    "outside": {"handle": b"/../../etc/passwd"},
    "no bytes": {"handle": "/torch_1_2_3"},
    "nested": {"handle": ((((),),),)},
}


def shared_call(handle: object, size: object) -> Call:
    untyped = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", handle, size)
    typed = Call(reductions.rebuild_typed_storage, untyped, torch.float32)
    return Call(reductions.rebuild_tensor, Tensor, typed, (0, (6,), (1,), False))


def test_the_truth_about_shared_memory_is_taken(shared: bytes) -> None:
    """The negative control of the lies below."""
    got = read(shared_call(shared, 24))
    assert isinstance(got, View)
    assert (got.dtype, got.size, got.memory.num_bytes) == (torch.float32, (6,), 24)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_about_shared_memory_is_refused(shared: bytes, lie: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="tensor payload was refused"):
        read(shared_call(**({"handle": shared, "size": 24} | lie)))


def test_a_storage_is_opened_once_and_every_mention_counts(shared: bytes) -> None:
    first, second = read([shared_call(shared, 24), shared_call(shared, 24)])  # type: ignore[misc]
    assert first.memory is second.memory
    assert first.memory.mentions == 2
    with pytest.raises(RequestError, match="two lengths"):
        read([shared_call(shared, 24), shared_call(shared, 23)])


def test_a_typed_storage_counts_elements(shared: bytes) -> None:
    storage = Call(
        reductions.rebuild_storage_filename, torch.FloatStorage, b"", shared, 6, torch.float32
    )
    got = read(Call(reductions.rebuild_tensor, Tensor, storage, (0, (6,), (1,), False)))
    assert isinstance(got, View)
    assert got.memory.num_bytes == 24


def test_the_same_bytes_are_not_unpacked_over_and_over() -> None:
    """A million references to one megabyte would be a terabyte of copies."""
    saved = torch.zeros(1000).untyped_storage().__reduce__()[1][0]
    calls = [(f"t{n}", Call(torch.storage._load_from_bytes, saved)) for n in range(100)]
    with pytest.raises(RequestError, match="over and over"):
        read(calls)


ran: list[object] = []


def _mark(*arguments: object) -> str:
    ran.append(arguments)
    return "x"


def nested(inner: bytes) -> Call:
    return Call(torch.storage._load_from_bytes, inner)


MALICIOUS: dict[str, Callable[[], object]] = {
    "os.system": lambda: Call(os.system, "exit 1"),
    "eval": lambda: Call(eval, "1"),
    "exec": lambda: Call(exec, "1"),
    "getattr": lambda: Call(getattr, "text", "upper"),
    "torch.load": lambda: Call(torch.load, "/etc/passwd"),
    "_rebuild_from_type": lambda: Call(torch._tensor._rebuild_from_type_v2, _mark, int, (), {}),
    "import": lambda: Call(torch._utils._import_dotted_name, "os.system"),
    "our own": lambda: Call(_mark, 1),
    "Client": lambda: Call(multiprocessing.connection.Client, ("127.0.0.1", 9)),
    "nested in a storage": lambda: nested(pickle.dumps(Call(_mark, 1))),
    "five nested": lambda: nested(pickle.dumps(Call(_mark, 1)) * 5 + bytes(8)),
    "zip in a storage": lambda: nested(b"PK\x03\x04" + bytes(100)),
    "inside a tensor": lambda: Call(
        torch._utils._rebuild_tensor_v2, Call(_mark, 1), 0, (1,), (1,), False, OrderedDict()
    ),
    "hooks": lambda: Call(torch._utils._rebuild_parameter, torch.ones(1), True, Call(_mark, 1)),
}


@pytest.mark.parametrize("make", MALICIOUS.values(), ids=MALICIOUS.keys())
def test_nothing_else_is_called(make: Callable[[], object]) -> None:
    ran.clear()
    for value in (make(), [("a", make())], {"flattened_tensor": make(), "metadata": []}):
        with pytest.raises(RequestError):
            read(value)
    assert ran == []


def test_the_refusal_names_the_global() -> None:
    with pytest.raises(RequestError, match=r"posix\.system"):
        read(Call(os.system, "exit 1"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a server with CUDA takes them")
def test_cuda_tensors_on_a_server_without_cuda_are_refused() -> None:
    nothing = Call(
        reductions.rebuild_cuda_tensor,
        *(Tensor, (0,), (1,), 0, torch.UntypedStorage, torch.float32, 0, None, 0, 0, False),
        *(None, 0, None, False),
    )
    with pytest.raises(RequestError, match="runs on a CPU"):
        read(nothing)
