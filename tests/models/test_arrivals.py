# SPDX-License-Identifier: Apache-2.0
"""Tensors that travel together arrive one by one, in order, intact, and not too many too early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.models import arrivals
from tetrarch.models.arrivals import Arrivals, CudaLane, Segment
from tetrarch.models.sources import SafetensorsSource, open_checkpoint

PIECE = 4096


class HostLane:
    """The way from memory to memory; a copy takes as long as `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.buffer, self._seconds = torch.full((PIECE,), 7, dtype=torch.uint8), seconds

    def empty(self, num_bytes: int) -> tuple[Tensor, object]:
        return torch.full((num_bytes,), 9, dtype=torch.uint8), num_bytes

    def copy(self, target: Tensor, known: object) -> None:
        time.sleep(self._seconds)
        target.copy_(self.buffer[: len(target)])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(arrivals, "PIECE", PIECE)
        monkeypatch.setattr(arrivals, "_SMALL", 64)
        monkeypatch.setattr(arrivals, "_AHEAD", 5 * PIECE)


@dataclass
class Numbers:
    """Forty tensors: scalars, vectors, matrices that are pieces of their own or several."""

    folder: Path
    tensors: dict[str, Tensor]

    @property
    def files(self) -> SafetensorsSource:
        return SafetensorsSource(self.folder)


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)
    shapes = ((), (0,), (31,), (64,), (3, 700), (1, 4096), (77, 111), (1,), (40, 50), (13,))
    tensors = {
        f"t.{index}.w": (torch.rand(shapes[index % 10], generator=generator) * 99).to(
            dtypes[index * 7 % 4]
        )
        for index in range(40)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Numbers(tmp_path, tensors)


def octets(tensor: Tensor) -> list[int]:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_what_arrives_is_what_was_read_in_the_order_asked_for(
    numbers: Numbers, seconds: float
) -> None:
    names = sorted(numbers.tensors, reverse=True)
    source = Arrivals(numbers.files, lambda: HostLane(seconds))
    assert (source.name, source.headers) == (str(numbers.folder), numbers.files.headers)
    found = list(source.read(names))  # kept: a later one must not reuse an earlier one's memory
    assert [name for name, _ in found] == names
    for name, tensor in found:
        want = numbers.tensors[name]
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype)
        assert octets(tensor) == octets(want), name


class Watched:
    """Files that note which bytes have been read, and may break."""

    def __init__(self, files: SafetensorsSource, broken: str = "") -> None:
        self._files, self._broken = files, broken
        self.name, self.headers = files.name, files.headers
        self.num_read, self._lock = 0, threading.Lock()

    def fill(self, wanted: Sequence[Segment]) -> None:
        if any(segment.name == self._broken for segment in wanted):
            raise CheckpointError("the disk is gone", why="a test", fix="none")
        self._files.fill(wanted)
        with self._lock:
            self.num_read += sum(len(segment.view) for segment in wanted)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_reading_goes_on_while_the_consumer_works_and_stops_where_it_is_far_ahead(
    tmp_path: Path,
) -> None:
    """Negative control: a plain source has read one tensor and no more."""
    tensors = {f"t.{index}": torch.zeros(PIECE, dtype=torch.uint8) for index in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    watched = Watched(SafetensorsSource(tmp_path))
    arriving = Arrivals(watched, HostLane).read(list(tensors))
    for taken in range(1, 5):
        next(arriving)
        far = (taken + 5) * PIECE
        until(lambda far=far: watched.num_read == far)
        time.sleep(0.02)
        assert watched.num_read == far
    arriving.close()


def test_a_file_that_breaks_ends_the_load_and_the_threads(numbers: Numbers) -> None:
    names = sorted(numbers.tensors)
    arriving = Arrivals(Watched(numbers.files, broken="t.4.w"), HostLane).read(names)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        list(arriving)
    until(lambda: not any(t.name.startswith("arrivals") for t in threading.enumerate()))


def test_only_files_for_a_gpu_are_read_ahead(demo_path: Path, make_plan: Any) -> None:
    plan = make_plan(demo_path)
    assert isinstance(open_checkpoint(plan, str(demo_path)), SafetensorsSource)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
def test_memory_that_is_still_read_is_not_overwritten(cuda: torch.device, tmp_path: Path) -> None:
    """Each tensor is used late, by a kernel queued behind slow ones, and freed at once."""
    tensors = {
        f"t.{index}": torch.full((3 << 20,), index, dtype=torch.uint8) for index in range(64)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    slow = torch.randn(4096, 4096, device=cuda)
    sums = torch.zeros(64, dtype=torch.int64, device=cuda)
    source = Arrivals(SafetensorsSource(tmp_path), lambda: CudaLane(cuda))
    for index, (_, tensor) in enumerate(source.read(list(tensors))):
        slow = (slow @ slow).clamp_(-1, 1)
        sums[index] = tensor.sum()
        del tensor
    assert sums.tolist() == [index * (3 << 20) for index in range(64)]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "nvfp4_online"])
def test_a_gpu_holds_what_a_cpu_holds_after_a_load_and_after_an_update(
    cuda: torch.device, demo_path: Path, start_rank: Any, quantization: str
) -> None:
    """Checksums are of the form in which weights are loaded, the same on every device."""
    settings = dict(quantization=quantization, dtype="bfloat16")
    want = start_rank(demo_path, **settings).weights.checksums()
    rank = start_rank(demo_path, device="cuda", **settings)
    assert rank.weights.checksums() == want
    rank.weights.scramble()
    assert rank.weights.checksums() != want
    rank.weights.commit(rank.weights.plan(str(demo_path), atomic=None))
    assert rank.weights.checksums() == want
