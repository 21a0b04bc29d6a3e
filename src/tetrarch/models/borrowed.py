# SPDX-License-Identifier: Apache-2.0
"""Tensors that still lie in the sender's memory, and the one copy that makes them ours.

torch shares tensors between processes by name: the pickle holds where a storage lies, how long it
is, and how the tensor looks at it. Nothing of that is believed here: a view must lie inside its
storage, and each storage is copied once, however many tensors look at it, so that what a call can
make us allocate is bounded by what the sender really holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from tetrarch.core.courtesy import gently
from tetrarch.models.unpickle import refused, shown

__all__ = ["Memory", "SavedBytes", "Storage", "View", "count", "owned", "sizes", "view"]

_ALIGNED = 16  # bytes; a multiple of every dtype's size
_LIMIT = 2**62  # sizes, strides and offsets beyond it overflow torch's 64-bit arithmetic


class Memory(Protocol):
    """Bytes of the sender, copied once; of a sender's empty storage too, which it waits for."""

    @property
    def num_bytes(self) -> int:
        """How many there are; known before any is read."""
        ...

    def copied(self, low: int, high: int) -> Tensor:
        """Return our own copy of the bytes `low` to `high`, uint8 `[high - low]`.

        Raises:
            RequestError: They are there no longer.
        """
        ...


@dataclass(frozen=True, eq=False)
class SavedBytes:
    """Bytes that came inside the pickle."""

    saved: bytes

    @property
    def num_bytes(self) -> int:
        """Their length."""
        return len(self.saved)

    def copied(self, low: int, high: int) -> Tensor:
        """Return a copy that may be written, as torch demands of its tensors."""
        if low == high:  # of nothing, torch makes no tensor
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(self.saved[low:high]), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory with a type: `dtype` is `None` for bare bytes."""

    memory: Memory
    dtype: torch.dtype | None = None

    def typed(self, dtype: torch.dtype) -> Storage:
        """Return the same memory with a type."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True, eq=False)
class View:
    """A tensor as the sender describes it; checked against its storage.

    Attributes:
        memory: Of its storage.
        dtype: Of the elements.
        offset: First element, in elements.
        size: Shape.
        stride: In elements.
    """

    memory: Memory
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it shows."""
        return _product(self.size)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and the one behind the last, in its storage; (0, 0) without elements."""
        if self.numel == 0:
            return 0, 0
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((length - 1) * stride for length, stride in steps)
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize


def sizes(values: object) -> tuple[int, ...]:
    """Return sizes or strides as the pickle gives them, a tuple of non-negative integers.

    Raises:
        RequestError: It is something else.
    """
    if not isinstance(values, tuple):
        raise refused("a shape or a stride is not a tuple")
    numbers = cast("tuple[object, ...]", values)
    if len(numbers) > 64:
        raise refused(f"a tensor has {len(numbers)} dimensions; torch allows 64")
    return tuple(count(number) for number in numbers)


def count(value: object) -> int:
    """Return a size, stride or offset.

    Raises:
        RequestError: It is not an integer between 0 and 2⁶².
    """
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise refused(f"a size, stride or offset is {shown(str(type(value).__name__))} or negative")
    return value


def view(storage: object, dtype: object, offset: object, look: tuple[object, object]) -> View:
    """Return a checked view.

    Args:
        storage: A `Storage`.
        dtype: A torch dtype.
        offset: First element, in elements of `dtype`.
        look: Size and stride.

    Raises:
        RequestError: It would read beyond its storage, or show more bytes than there are.
    """
    if not (isinstance(storage, Storage) and isinstance(dtype, torch.dtype)):
        raise refused("a tensor is built on something that is no storage")
    size, stride = sizes(look[0]), sizes(look[1])
    if len(size) != len(stride):
        raise refused(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    if _product([max(length, 1) for length in size]) >= _LIMIT:
        raise refused("a tensor has more than 2⁶² elements")
    made = View(storage.memory, dtype, count(offset), size, stride)
    held = storage.memory.num_bytes
    if made.span[1] > held:
        raise refused(f"a tensor reaches to byte {made.span[1]} of a storage of {held} bytes")
    if made.numel * dtype.itemsize > held:
        raise refused(
            f"a tensor shows {made.numel * dtype.itemsize} bytes of a storage of {held}",
            fix="call .contiguous() on expanded tensors before sending them",
        )
    return made


def owned(views: Sequence[View]) -> list[Tensor]:
    """Copy out of the sender's memory: one copy per storage, of the bytes that the views span.

    Returns:
        Tensors in the order of `views`, on the device of their storage; those of one storage share
        their copy, as they shared the storage.

    Raises:
        RequestError: The sender's memory is gone, or there is no room for the copies.
    """
    spans: dict[Memory, tuple[int, int]] = {}
    for seen in gently(views):
        first, end = seen.span
        low, high = spans.get(seen.memory, (first, end))
        if end > 0:
            spans[seen.memory] = min(low, first // _ALIGNED * _ALIGNED), max(high, end)
        else:
            spans.setdefault(seen.memory, (0, 0))
    copies = {memory: _copied(memory, span) for memory, span in gently(spans.items())}
    return [_on_copy(seen, copies[seen.memory], spans[seen.memory][0]) for seen in gently(views)]


def _copied(memory: Memory, span: tuple[int, int]) -> Tensor:
    try:
        return memory.copied(*span)
    except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
        raise refused(
            f"there is no room for a copy of its {span[1] - span[0]} bytes",
            fix="send smaller buckets",
        ) from error


def _on_copy(seen: View, copy: Tensor, low: int) -> Tensor:
    bare = torch.empty(0, dtype=seen.dtype, device=copy.device)
    if seen.numel == 0:
        return bare.reshape(seen.size)
    offset = seen.offset - low // seen.dtype.itemsize
    return bare.set_(copy.untyped_storage(), offset, seen.size, seen.stride)


def _product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
