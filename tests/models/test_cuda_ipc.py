# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import subprocess
import sys

import pytest
import torch

from tetrarch.core.errors import RequestError
from tetrarch.models.cuda_ipc import device_index, open_cuda
from tetrarch.models.payload import decode_payload

HANDLE = b"\x01c" + bytes(64)
REST = (b"/torch_1_2_3", 0, bytes(64), True)

SENDER = """
import base64, sys, torch
from multiprocessing.reduction import ForkingPickler
flat = torch.arange(1000, dtype=torch.float32, device="cuda")
def send(value):
    print(base64.b64encode(bytes(ForkingPickler.dumps(value))).decode(), flush=True)
send({"a": flat[10:20].view(2, 5), "b": flat.bfloat16(), "none": flat[:0]})
honest = ForkingPickler(sys.stdout.buffer).dispatch_table[torch.Tensor]
def lie(tensor):
    rebuild, arguments = honest(tensor)
    size = LIE
    return rebuild, (type(tensor), (size // 4,), (1,), 0, *arguments[4:8], size, *arguments[9:])
ForkingPickler.register(torch.Tensor, lie)
send({"a": flat})
sys.stdin.readline()
flat.fill_(7)
torch.cuda.synchronize()
print("changed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("device", [-1, 99, True, None, "GPU-0", 0.0])
def test_a_device_that_is_not_here_is_refused(device: object) -> None:
    with pytest.raises(RequestError, match="CUDA device"):
        device_index(device)


@pytest.mark.parametrize(
    ("handle", "rest"),
    [
        (b"", REST),
        (HANDLE + b"x", REST),
        (b"\x01e" + bytes(64), REST),  # an expandable segment
        (HANDLE, REST[:3]),
        (HANDLE, (b"/../../etc/passwd", *REST[1:])),
        (HANDLE, (b"/gone_1_2_3", *REST[1:])),
        (HANDLE, (REST[0], 10_000, *REST[2:])),
        (HANDLE, (REST[0], -1, *REST[2:])),
        (HANDLE, (*REST[:2], b"short", True)),
        (HANDLE, ("text", *REST[1:])),
    ],
)
def test_what_points_nowhere_is_refused_before_it_is_opened(
    handle: bytes, rest: tuple[object, ...]
) -> None:
    with pytest.raises(RequestError):
        open_cuda(0, handle, (4, 0), rest)


@pytest.mark.gpu
def test_cuda_tensors_outlive_the_sender_and_lies_are_refused() -> None:
    code = SENDER.replace("LIE", str(1 << 30))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        got = decode_payload(base64.b64decode(sender.stdout.readline()), None)
        with pytest.raises(RequestError, match="more than were shared"):
            decode_payload(base64.b64decode(sender.stdout.readline()), None)
        sender.stdin.write("\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == "changed\n"
        sender.kill()
    assert got["a"].is_cuda
    assert got["a"].tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert torch.equal(got["b"].cpu(), torch.arange(1000.0).bfloat16())
    assert got["none"].shape == (0,)
