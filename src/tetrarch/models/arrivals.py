# SPDX-License-Identifier: Apache-2.0
"""Tensors of files on their way to a GPU: read and copied ahead, while earlier ones are quantized.

Neighbours travel together, in pieces. A thread reads a piece into pinned memory of its own, copies
it over a stream of its own and waits; several threads keep disk, bus and GPU busy at once. Host
memory is one piece a thread, device memory what is ahead of the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tetrarch.core.units import MIB, align_up

__all__ = ["PIECE", "Arrivals", "CudaLane", "Files", "Lane", "Segment"]

_NUM_LANES = 8
PIECE = 16 * MIB  # 300 us on the bus, so that starting a copy does not show
_AHEAD = 160 * MIB  # of what is read or being read, that nobody has asked for yet
_SMALL = (
    1 << 16
)  # bytes; smaller tensors stay on the host, where asking what they hold costs nothing
_ALIGN = 256  # bytes, as torch's allocator has it


class Header(Protocol):
    """What a tensor is, known before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_bytes(self) -> int: ...


class Segment(NamedTuple):
    """Some bytes of a tensor, and where they are wanted."""

    name: str
    start: int
    view: memoryview


class Files(Protocol):
    """Where tensors come from."""

    @property
    def name(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, Header]: ...

    def fill(self, wanted: Sequence[Segment]) -> None:
        """Read some bytes of some tensors.

        Raises:
            CheckpointError: The file has changed since it was opened, or cannot be read.
        """
        ...


class Lane(Protocol):
    """One thread's way to a device.

    Attributes:
        buffer: (`PIECE`,) uint8 on the host, to copy from.
    """

    buffer: Tensor

    def empty(self, num_bytes: int) -> tuple[Tensor, object]:
        """Return (num_bytes,) uint8 on the device, and what `copy` must know of it."""
        ...

    def copy(self, target: Tensor, known: object) -> None:
        """Fill `target` from the beginning of the buffer, and return when that is done."""
        ...


class CudaLane:
    """A stream of its own, and pinned memory.

    A copy first waits for everything that was queued when its target was allocated: whoever had
    that memory before may still be read there.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self._device, self._stream = device, torch.cuda.Stream(device)

    def empty(self, num_bytes: int) -> tuple[Tensor, object]:
        """Allocate in the caller's stream, where it will be used."""
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return target, torch.cuda.current_stream(self._device).record_event()

    def copy(self, target: Tensor, known: object) -> None:
        """Copy without holding up any other stream."""
        assert isinstance(known, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(known)
            target.copy_(self.buffer[: len(target)], non_blocking=True)
        self._stream.synchronize()


class _Part(NamedTuple):
    """Some bytes of a tensor, and where in the batch they go."""

    name: str
    start: int
    num_bytes: int
    at: int


@dataclass(slots=True)
class _Batch:
    """Neighbours: as many as fit in a piece, or one large tensor alone."""

    places: dict[str, int | None] = field(default_factory=dict[str, "int | None"])  # None: host
    num_bytes: int = 0
    on_host: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    on_device: Tensor | None = None
    jobs: list[Future[None]] = field(default_factory=list[Future[None]])

    def add(self, name: str, num_bytes: int) -> None:
        if num_bytes <= _SMALL:
            self.places[name] = None
        else:
            self.places[name] = self.num_bytes
            self.num_bytes = align_up(self.num_bytes + num_bytes, _ALIGN)

    def has_room(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= PIECE or num_bytes <= _SMALL

    def pieces(self, headers: Mapping[str, Header]) -> Iterator[list[_Part]]:
        """Return what each thread reads at a time: a run of the batch, in order."""
        sizes = {
            name: headers[name].num_bytes for name, at in self.places.items() if at is not None
        }
        if self.num_bytes > PIECE:
            ((name, size),) = sizes.items()
            for start in range(0, size, PIECE):
                yield [_Part(name, start, min(PIECE, size - start), start)]
        elif sizes:
            yield [_Part(name, 0, size, self.places[name] or 0) for name, size in sizes.items()]


class Arrivals:
    """A source whose tensors lie on a device when they are handed out; small ones on the host.

    Args:
        files: Where they come from.
        make_lane: Makes one thread's way to the device.
    """

    def __init__(self, files: Files, make_lane: Callable[[], Lane]) -> None:
        self._files, self._make_lane = files, make_lane

    @property
    def name(self) -> str:
        """That of the files."""
        return self._files.name

    @property
    def headers(self) -> Mapping[str, Any]:
        """Those of the files."""
        return self._files.headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order; neighbours share memory.

        Raises:
            CheckpointError: A file has changed since it was opened, or cannot be read.
        """
        made = [self._make_lane() for _ in range(_NUM_LANES)]
        lanes: SimpleQueue[Lane] = SimpleQueue()
        for lane in made:
            lanes.put(lane)
        ahead: deque[_Batch] = deque()
        num_ahead = 0
        pool = ThreadPoolExecutor(_NUM_LANES, thread_name_prefix="arrivals")
        try:
            for batch in self._cut(names):
                self._launch(batch, pool, lanes, empty=made[0].empty)
                ahead.append(batch)
                num_ahead += batch.num_bytes
                while num_ahead > _AHEAD:
                    num_ahead -= ahead[0].num_bytes
                    yield from self._unpack(ahead.popleft())
            while ahead:
                yield from self._unpack(ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _cut(self, names: Iterable[str]) -> Iterator[_Batch]:
        batch = _Batch()
        for name in names:
            num_bytes = self._files.headers[name].num_bytes
            if not batch.has_room(num_bytes):
                yield batch
                batch = _Batch()
            batch.add(name, num_bytes)
        yield batch

    def _launch(
        self,
        batch: _Batch,
        pool: ThreadPoolExecutor,
        lanes: SimpleQueue[Lane],
        *,
        empty: Callable[[int], tuple[Tensor, object]],
    ) -> None:
        small = [name for name, at in batch.places.items() if at is None]
        if small:
            batch.jobs.append(pool.submit(self._read_small, small, batch.on_host))
        if batch.num_bytes:
            batch.on_device, known = empty(batch.num_bytes)
            for piece in batch.pieces(self._files.headers):
                job = pool.submit(self._carry, piece, lanes, batch.on_device, known)
                batch.jobs.append(job)

    def _read_small(self, names: list[str], on_host: dict[str, Tensor]) -> None:
        for name in names:
            on_host[name] = torch.empty(self._files.headers[name].num_bytes, dtype=torch.uint8)
        views = {name: on_host[name].numpy().data for name in names}
        self._files.fill([Segment(name, 0, view) for name, view in views.items()])

    def _carry(
        self, piece: list[_Part], lanes: SimpleQueue[Lane], target: Tensor, known: object
    ) -> None:
        """Read a piece and copy it: the work of one thread."""
        lane, first, last = lanes.get(), piece[0].at, piece[-1]
        view = lane.buffer.numpy().data
        places = [part.at - first for part in piece]
        try:
            self._files.fill(
                [
                    Segment(part.name, part.start, view[at : at + part.num_bytes])
                    for part, at in zip(piece, places, strict=True)
                ]
            )
            lane.copy(target[first : last.at + last.num_bytes], known)
        finally:
            lanes.put(lane)

    def _unpack(self, batch: _Batch) -> Iterator[tuple[str, Tensor]]:
        for job in batch.jobs:
            job.result()
        for name, at in batch.places.items():
            header = self._files.headers[name]
            if at is None or batch.on_device is None:
                octets = batch.on_host.pop(name)
            else:
                octets = batch.on_device[at : at + header.num_bytes]
            yield name, octets.view(header.dtype).view(header.shape)
