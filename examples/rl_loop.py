# SPDX-License-Identifier: Apache-2.0
"""A reinforcement-learning loop without the learning: perturb, push, generate.

    make serve                                    # in one terminal
    python examples/rl_loop.py                    # in another, on the same machine

A fake trainer reads the served checkpoint, perturbs its weights, and pushes the same new weights
in the three ways there are: from a folder, as tensors, and by broadcast. After each push the
server's checksum must be the same. At the end the first weights go back, and so does the checksum.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import pickle
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import distributed_c10d, rendezvous

PROMPT = "<|im_start|>user\nWhat is 27 + 35?<|im_end|>\n<|im_start|>assistant\n"
GROUP = "weight_update_group"
Weights = Mapping[str, Tensor]


class Server:
    """The endpoints that a trainer calls."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if admin_key:
            self._headers["Authorization"] = f"Bearer {admin_key}"

    def call(self, path: str, **body: Any) -> Any:
        """POST, and return the reply; an error ends the program with the server's words."""
        return self._ask(path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        """GET, and return the reply."""
        return self._ask(path, None)

    def _ask(self, path: str, body: bytes | None) -> Any:
        request = Request(self._url + path, data=body, headers=self._headers)
        try:
            with urlopen(request, timeout=600) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None
        except URLError as error:
            raise SystemExit(f"no server at {self._url} ({error.reason}): make serve") from None

    def generate(self) -> tuple[str, str]:
        """Return a greedy answer, and the version of the weights that gave it."""
        sampling = {"temperature": 0, "max_new_tokens": 16}
        reply = self.call("/generate", text=PROMPT, sampling_params=sampling)
        return reply["text"], reply["meta_info"]["weight_version"]

    def checksum(self) -> str:
        """Return one checksum of all weights."""
        return self.call("/weights_checker", action="checksum")["per_engine_checksum"]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint."""
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def perturb(weights: Weights, step: int) -> dict[str, Tensor]:
    """Stand in for an optimizer: a little noise on every matrix."""
    torch.manual_seed(step)
    noisy: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape) * tensor.float().std() * 0.002
        noisy[name] = (tensor.float() + noise).to(tensor.dtype) if tensor.ndim > 1 else tensor
    return noisy


def push_from_disk(server: Server, weights: Weights, served: Path, version: str) -> None:
    """Write a checkpoint, and name its folder."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in served.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, scratch)
        save_file(dict(weights), Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        reply = server.call("/update_weights_from_disk", model_path=scratch, weight_version=version)
    print(f"  {reply['message']}; atomic: {reply['atomic']}")


def buckets(weights: Weights, size: int = 40) -> Iterator[dict[str, Tensor]]:
    """Cut weights into calls; layers and experts may be cut anywhere."""
    names = iter(weights)
    while chosen := list(itertools.islice(names, size)):
        yield {name: weights[name] for name in chosen}


def push_tensors(server: Server, weights: Weights, version: str) -> None:
    """Send the bytes themselves, between a begin and an end.

    A trainer on the same GPU sends handles instead: torch's `ForkingPickler` makes them.
    """
    server.call("/begin_weight_update")
    for bucket in buckets(weights):
        payload = base64.b64encode(pickle.dumps(list(bucket.items()))).decode()
        server.call(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload],
            weight_version=version,
        )
    print(f"  {server.call('/end_weight_update')['message']}")


def join_group(port: int) -> dist.ProcessGroup:
    """Be rank 0 of a group of two, beside whatever groups the trainer has of its own."""
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timedelta(seconds=60)))
    # Private, and what slime, verl and OpenRLHF call: torch has no public way to a second world.
    group, _ = distributed_c10d._new_process_group_helper(
        2,
        0,
        [],
        "gloo",
        distributed_c10d.PrefixStore(GROUP, store),
        group_name=GROUP,
        timeout=timedelta(seconds=60),
    )
    distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def push_broadcast(server: Server, weights: Weights, version: str) -> None:
    """Broadcast to every server of a group; each says over HTTP what it is about to receive."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    with suppress(SystemExit):  # a loop that was interrupted may have left its group
        server.call("/destroy_weights_update_group")
    with in_background(
        server, "/init_weights_update_group", rank_offset=1, backend="gloo", **place
    ):
        group = join_group(port)
    for bucket in buckets(weights):
        header = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
        }
        path = "/update_weights_from_distributed"
        with in_background(server, path, flush_cache=False, weight_version=version, **header):
            for tensor in bucket.values():
                dist.broadcast(tensor.contiguous(), src=0, group=group)
    server.call("/flush_cache")  # all has been sent
    server.call("/destroy_weights_update_group")
    dist.destroy_process_group(group)
    print(f"  broadcast {len(weights)} tensors")


@contextmanager
def in_background(server: Server, path: str, **body: Any) -> Iterator[None]:
    """Call while the block runs: both ends of a group must be there at once."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.call, path, **body)
        yield
        reply.result()


def lend_memory(server: Server, weights: Weights, version: str) -> None:
    """Give the server's memory to the trainer for a while, then bring the weights back."""
    server.call("/pause_generation")
    print(f"  {server.call('/release_memory_occupation')['message']}")
    server.call("/resume_memory_occupation", tags=["weights"])
    push_tensors(server, weights, version)
    server.call("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    server.call("/continue_generation")


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--admin-key")
    args = parser.parse_args()
    server = Server(args.url, args.admin_key)
    served = Path(server.get("/model_info")["model_path"])
    first = read_weights(served)
    if not first:
        raise SystemExit(f"{served} holds no weights on this machine")
    before, text = server.checksum(), server.generate()[0]
    print(f"serving {served}, checksum {before}\n  What is 27 + 35? -> {text!r}")

    noisy = perturb(first, step=1)
    ways: dict[str, Callable[[str], None]] = {
        "disk": lambda version: push_from_disk(server, noisy, served, version),
        "tensors": lambda version: push_tensors(server, noisy, version),
        "broadcast": lambda version: push_broadcast(server, noisy, version),
        "memory lent and taken back": lambda version: lend_memory(server, noisy, version),
    }
    sums: set[str] = set()
    for step, (way, push) in enumerate(ways.items(), start=1):
        print(f"{way}:")
        push(f"step-{step}")
        answer, version = server.generate()
        sums.add(server.checksum())
        print(f"  What is 27 + 35? -> {answer!r}, version {version}")
        if version != f"step-{step}":
            raise SystemExit(f"the server answers with {version}, not with step-{step}")
    if len(sums) > 1 or before in sums:
        raise SystemExit(f"the same weights have different checksums: {sums}, first {before}")

    server.call("/update_weights_from_disk", model_path=str(served), weight_version="default")
    if (after := server.checksum()) != before or server.generate()[0] != text:
        raise SystemExit(f"the first weights did not come back: {after}, was {before}")
    print(f"the first weights are back, checksum {after}")


if __name__ == "__main__":
    main()
