# SPDX-License-Identifier: Apache-2.0
"""The process that receives over gloo: `python -m tetrarch.distributed.receiver DESCRIPTOR`.

gloo ends the process, on a thread of its own where nothing can catch it, when a broadcast brings
more bytes than there is room for. A trainer that announces one tensor and sends another must not
end the engine; so `GlooLink` starts this process for each group, and outlives it.

It says over a pipe when it is there, and answers each request with words: none where all went well.
After others it ends, for ranks that gave up at different places agree on nothing any more. The
memory that it has filled goes to the engine with the answer.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time
from multiprocessing.connection import Connection as Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from tetrarch.distributed.lifeline import first_line
from tetrarch.distributed.parcel import Broadcast, Parcel
from tetrarch.distributed.rendezvous import Backend, connect, from_trainer, left

__all__ = ["main"]


def main() -> None:
    """Join a group, and receive until the engine has gone, or a broadcast fails."""
    pipe = Pipe(int(sys.argv[1]))
    Thread(target=_end_with_engine, args=(pipe.fileno(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ended by a trainer, it leaves no dump behind
    # Where a trainer sends more than the machine holds, the kernel is to choose us, not the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    pipe.send("")
    try:
        _serve(pipe)
    except (RuntimeError, ValueError, OSError) as error:
        pipe.send(first_line(error))


def _serve(pipe: Pipe) -> None:
    meeting, timeout = pipe.recv()
    connection = connect(meeting, time.monotonic() + timeout)
    pipe.send("")
    while True:
        parcel, timeout = pipe.recv()
        memory = _receive(connection.backend, parcel, time.monotonic() + timeout)
        pipe.send("")
        send_handle(pipe, memory, os.getppid())
        os.close(memory)


def _receive(backend: Backend, parcel: Parcel, deadline: float) -> int:
    memory = parcel.allocate()
    for buffer, broadcast in zip(parcel.map(memory), parcel.broadcasts, strict=True):
        _take(backend, buffer, broadcast, deadline)
    return memory


def _take(backend: Backend, buffer: Tensor, broadcast: Broadcast, deadline: float) -> None:
    """Receive bytes, whatever the sender's dtype: gloo knows no FP8, and counts bytes."""
    seal = torch.tensor(list(broadcast.seal), dtype=torch.uint8)
    tail = buffer[broadcast.num_bytes - len(seal) :]
    tail.copy_(seal)
    work = backend.broadcast([buffer], from_trainer(deadline))
    work.wait(left(deadline))
    # gloo takes a message that is shorter than announced, and leaves the rest as it was.
    if len(seal) and torch.equal(tail, seal):
        raise RuntimeError("a tensor was shorter than announced")


def _end_with_engine(pipe: int) -> None:
    """End this process, whatever it waits for, when the engine's end of the pipe has closed."""
    hangup = select.poll()
    hangup.register(pipe, 0)
    hangup.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
