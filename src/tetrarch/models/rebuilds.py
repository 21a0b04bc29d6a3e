# SPDX-License-Identifier: Apache-2.0
"""The globals that a payload of tensors may name, each with our own implementation.

torch pickles a tensor as a call of one of its rebuild functions; SGLang's clients add a CUDA
rebuild that knows devices by UUID, and two classes. Nothing of torch's or SGLang's is called by
what a client sends: a row of the table below is a method of ours that checks its arguments.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from tetrarch.models.borrowed import SavedBytes, Storage, View, count, sizes, view
from tetrarch.models.cuda_ipc import CudaMemory, device_index, open_cuda
from tetrarch.models.shared_file import SharedFile, open_shared
from tetrarch.models.unpickle import Row, refused, unpickle

__all__ = ["BUCKET_PART", "RANK_TENSORS", "Rebuilds"]

BUCKET_PART = "FlattenedTensorMetadata"
RANK_TENSORS = "LocalSerializedTensor"

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# SGLang has moved these; clients pickle the path of the version they import.
_RECORDS = (
    ("sglang.srt.weight_sync.tensor_bucket", BUCKET_PART),
    ("sglang.srt.model_executor.model_runner", RANK_TENSORS),
    ("sglang.srt.model_executor.model_runner_components.weight_updater", RANK_TENSORS),
)
_BY_UUID = "_rebuild_cuda_tensor_modified"

# A storage outside shared memory, as torch.save wrote it before its zip format: five pickles
# (magic, version, platform, the storage's description, its key), its length, its bytes.
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001


@dataclass(frozen=True)
class _StorageClass:
    """A storage class by name: its dtype, or `None` for bare bytes."""

    dtype: torch.dtype | None


_STORAGES: dict[tuple[str, str], object] = {
    ("torch.storage", "UntypedStorage"): _StorageClass(None),
    ("torch.storage", "TypedStorage"): _StorageClass(None),
    **{("torch", name): _StorageClass(dtype) for name, dtype in _STORAGE_DTYPES.items()},
}
_CONSTANTS: dict[tuple[str, str], object] = {
    **_STORAGES,
    **{("torch", name): vars(torch)[name] for name in _DTYPES},
    ("torch", "Tensor"): Row("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): Row("torch.nn.Parameter"),
    ("multiprocessing.resource_sharer", "DupFd"): Row("DupFd", is_record=True),
    **{path: Row(path[1], is_record=True) for path in _RECORDS},
}


class Rebuilds:
    """Reads one payload; opens each storage once, however often it is named.

    Args:
        num_bytes: Length of the payload: pickles within it cannot be longer together, unless the
            same bytes are unpacked over and over.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = 2 * num_bytes  # the payload itself, and all pickles within it
        self._files: dict[bytes, SharedFile] = {}
        self._opened: dict[bytes, CudaMemory] = {}
        self._preamble = b""  # how saved storages begin; all of one sender begin alike

    def read(self, pickled: bytes) -> object:
        """Return lists, tuples, dicts, views and records in place of what was pickled.

        Raises:
            RequestError: The pickle names, claims or needs what it may not.
        """
        self._spend(len(pickled))
        # Not kept: a cycle through the bound methods would hold the sender's memory until the
        # garbage collector comes by.
        calls = {path: Row(".".join(path), call) for path, call in self._calls()}
        return unpickle(io.BytesIO(pickled), _CONSTANTS | calls)

    def _calls(self) -> list[tuple[tuple[str, str], Callable[..., object]]]:
        shared, plain = "torch.multiprocessing.reductions", "torch._utils"
        return [
            ((shared, "rebuild_tensor"), self._tensor),
            ((shared, "rebuild_cuda_tensor"), self._cuda_tensor),
            ((shared, "rebuild_storage_filename"), self._storage_filename),
            ((shared, "rebuild_storage_fd"), self._storage_fd),
            ((shared, "rebuild_storage_empty"), self._storage_empty),
            ((shared, "rebuild_typed_storage"), self._typed_storage),
            ((shared, "rebuild_typed_storage_child"), self._typed_storage_child),
            ((plain, "_rebuild_tensor_v2"), self._tensor_v2),
            ((plain, "_rebuild_tensor_v3"), self._tensor_v3),
            ((plain, "_rebuild_parameter"), self._parameter),
            (("torch.storage", "_load_from_bytes"), self._saved_storage),
            (("sglang.srt.utils.patch_torch", _BY_UUID), self._cuda_tensor),
            (("sglang.srt.patch_torch", _BY_UUID), self._cuda_tensor),
            (("torch", "Size"), sizes),
            (("collections", "OrderedDict"), dict),
        ]

    def _spend(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise refused("it unpacks the same bytes over and over")

    def _tensor(self, _cls: object, storage: object, look: object) -> View:
        if not (isinstance(storage, Storage) and isinstance(look, tuple)):
            raise refused("a tensor is built on something that is no storage")
        offset, size, stride, _ = cast("tuple[object, ...]", look)
        return view(storage, storage.dtype, offset, (size, stride))

    def _tensor_v2(
        self, storage: object, offset: object, size: object, stride: object, *_: object
    ) -> View:
        dtype = storage.dtype if isinstance(storage, Storage) else None
        return view(storage, dtype, offset, (size, stride))

    def _tensor_v3(self, storage: object, offset: object, *rest: object) -> View:
        size, stride, _, _, dtype, *_ = rest
        return view(storage, dtype, offset, (size, stride))

    def _parameter(self, tensor: object, *_: object) -> object:
        return tensor

    def _typed_storage(self, storage: object, dtype: object) -> Storage:
        if not (isinstance(storage, Storage) and isinstance(dtype, torch.dtype)):
            raise refused("a storage is given a type that is none")
        return storage.typed(dtype)

    def _typed_storage_child(self, storage: object, cls: object) -> Storage:
        return self._typed_storage(storage, cls.dtype if isinstance(cls, _StorageClass) else None)

    def _storage_filename(
        self, _cls: object, _manager: object, handle: object, size: object, dtype: object = None
    ) -> Storage:
        if not isinstance(handle, bytes):
            raise refused("shared memory is named by something that is not bytes")
        num_bytes = count(size) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)
        if handle in self._files:
            self._files[handle].mentions += 1
        else:
            self._files[handle] = open_shared(handle, num_bytes)
        if self._files[handle].num_bytes != num_bytes:
            raise refused("one storage is there with two lengths")
        return Storage(self._files[handle], dtype if isinstance(dtype, torch.dtype) else None)

    def _storage_fd(self, _cls: object, _fd: object, _size: object) -> Storage:
        raise refused(
            "its tensors are shared by file descriptor, which only a process with the sender's "
            "multiprocessing key can fetch",
            fix='call torch.multiprocessing.set_sharing_strategy("file_system") in the trainer',
        )

    def _storage_empty(self, _cls: object) -> Storage:
        return Storage(SavedBytes(b""))

    def _cuda_tensor(self, *arguments: object) -> View:
        _, size, stride, offset, _, dtype, device, handle, length, place, _, *rest = arguments
        if not torch.cuda.is_available():
            raise refused("it holds CUDA tensors, and this server runs on a CPU")
        index = device_index(device)
        if handle is None or length == 0:
            memory = SavedBytes(b"")
        else:
            memory = self._cuda_memory(index, handle, (count(length), count(place)), tuple(rest))
        return view(Storage(memory), dtype, offset, (size, stride))

    def _cuda_memory(
        self, device: int, handle: object, extent: tuple[int, int], rest: tuple[object, ...]
    ) -> CudaMemory:
        if not isinstance(handle, bytes):
            raise refused("CUDA memory is named by something that is not bytes")
        key = b"%d %d %d %b" % (device, *extent, handle)
        if key not in self._opened:
            self._opened[key] = open_cuda(device, handle, extent, rest)
        return self._opened[key]

    def _saved_storage(self, saved: object) -> Storage:
        if not isinstance(saved, bytes):
            raise refused("a saved storage is not bytes")
        self._spend(len(saved))
        stream = io.BytesIO(saved)
        self._skip_preamble(stream, saved)
        storage = unpickle(stream, _STORAGES, persistent=_described)
        keys = unpickle(stream, _STORAGES)
        if not isinstance(storage, _Saved):
            raise refused("a saved storage is not one that torch pickles")
        body = saved[stream.tell() + 8 :]
        if keys != [storage.key] or len(body) != storage.num_bytes:
            raise refused(f"a saved storage claims {storage.num_bytes} bytes and has {len(body)}")
        return Storage(SavedBytes(body), storage.dtype)

    def _skip_preamble(self, stream: io.BytesIO, saved: bytes) -> None:
        """Check magic, version and platform; bytes that have been read need no second look."""
        if self._preamble and saved.startswith(self._preamble):
            stream.seek(len(self._preamble))
            return
        magic, version, _ = (unpickle(stream, {}) for _ in range(3))
        if (magic, version) != (_MAGIC, _VERSION):
            raise refused("a saved storage is not one that torch pickles")
        self._preamble = saved[: stream.tell()]


@dataclass(frozen=True)
class _Saved:
    """A saved storage's description."""

    key: str
    num_bytes: int
    dtype: torch.dtype | None


def _described(persistent: object) -> _Saved:
    """Read a storage's persistent id: kind, class, key, device it was on, elements, view."""
    match persistent:
        case ("storage", _StorageClass(dtype), str(key), str(), int(numel), None):
            return _Saved(key, count(numel) * (dtype.itemsize if dtype else 1), dtype)
        case _:
            raise refused("a saved storage has no description that torch writes")
