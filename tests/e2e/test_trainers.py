# SPDX-License-Identifier: Apache-2.0
"""What reinforcement-learning trainers send, call by call, repetitions and mistakes included."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import pickle
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from conftest import RunningServer, TrainedServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"
TENSOR, NORM = "/update_weights_from_tensor", "model.norm.weight"
INIT = "/init_weights_update_group"
PLACE = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
EXPERT = "model.layers.2.mlp.experts.3"


@pytest.fixture
def weights(other_path: Path) -> dict[str, Tensor]:
    """What the trainer has learnt, without the draft layer that is not served."""
    found = load_file(other_path / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if not name.startswith("mtp.")}


@pytest.fixture
def wanted(trained: TrainedServer, demo_path: Path, other_path: Path) -> dict[str, str]:
    """Checksums of a fresh load of what the trainer has learnt."""
    trained.load_from(other_path)
    found = trained.checksums()
    trained.load_from(demo_path)
    assert trained.checksums() != found
    return found


def buckets(weights: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Cut them anywhere, in an order that separates every gate from its up."""
    names = sorted(weights, key=lambda name: (name.endswith("up_proj.weight"), name))
    size = -(-len(names) // count)
    for start in range(0, len(names), size):
        yield {name: weights[name] for name in names[start : start + size]}


def saved(tensors: Mapping[str, Tensor]) -> list[str]:
    """One rank's payload, its bytes inside the pickle."""
    return [base64.b64encode(pickle.dumps(list(tensors.items()))).decode()]


def shared(tensors: Mapping[str, Tensor]) -> list[str]:
    """One rank's payload as trainers on the same host send it: where tensors lie in memory."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    data = bytes(ForkingPickler.dumps(list(tensors.items())))
    torch.multiprocessing.set_sharing_strategy(before)
    return [base64.b64encode(data).decode()]


def twice(server: TrainedServer, path: str, **body: Any) -> Any:
    """Call as a client does that has given up waiting and tries again."""
    server.ask(path, **body)
    return server.ask(path, **body)


def test_the_calls_of_slime(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    trained.ask("/abort_request", abort_all=True)
    assert trained.http.get("/health_generate").status_code == 200
    twice(trained, "/pause_generation")
    assert trained.http.get("/flush_cache").status_code == 200
    twice(trained, "/release_memory_occupation")
    twice(trained, "/resume_memory_occupation", tags=["weights"])
    twice(trained, "/post_process_weights", restore_weights_before_load=True)
    for bucket in buckets(weights, 6):
        twice(trained, TENSOR, serialized_named_tensors=shared(bucket), flush_cache=False)
    twice(trained, "/post_process_weights", post_process_quantization=True)
    twice(trained, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    trained.ask("/update_weight_version", new_version="rollout 7")
    twice(trained, "/continue_generation")
    assert trained.checksums() == wanted
    assert trained.http.get("/get_weight_version").json() == {"weight_version": "rollout 7"}
    sampling = {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 5,
    }
    reply = trained.generate(text="12 + 30", sampling_params=sampling, return_logprob=True)
    assert len(reply["meta_info"]["output_token_logprobs"][0]) == 3
    assert reply["meta_info"]["weight_version"] == "rollout 7"
    assert trained.load()["num_total_reqs"] == 0
    assert trained.http.get("/get_server_info").json()["tp_size"] == 1


def test_the_calls_of_verl(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    twice(trained, "/release_memory_occupation", tags=["kv_cache", "weights"])
    twice(trained, "/resume_memory_occupation", tags=["weights"])
    for bucket in buckets(weights, 4):
        body = {
            "serialized_named_tensors": saved(bucket),
            "load_format": None,
            "flush_cache": False,
            "weight_version": "global step 3",
        }
        twice(trained, TENSOR, **body)
    assert trained.http.get("/flush_cache").status_code == 200
    twice(trained, "/resume_memory_occupation", tags=["kv_cache"])
    assert trained.http.get("/flush_cache").status_code == 200
    assert trained.checksums() == wanted
    reply = trained.generate(text="1 + 1", sampling_params={"max_new_tokens": 4}, rid="a")
    assert reply["meta_info"]["weight_version"] == "global step 3"


def test_tensors_are_broadcast_to_a_group(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    loop = _example()
    loop.push_broadcast(loop.Server(trained.url, None), weights, "sent")
    assert trained.checksums() == wanted
    assert trained.http.get("/get_weight_version").json() == {"weight_version": "sent"}
    assert not dist.is_initialized()


def test_a_trainer_that_sends_more_than_it_announced_ends_its_group_and_nothing_else(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    before, loop = trained.checksums(), _example()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(trained.ask, INIT, master_port=(port := free_port()), **PLACE)
        group = loop.join_group(port)
        reply.result()
        [receiver] = trained.engine.children()
        norm = weights[NORM]
        dtype, shape = str(norm.dtype).removeprefix("torch."), list(norm.shape)
        header = {"names": [NORM], "dtypes": [dtype], "shapes": [shape]}
        reply = pool.submit(trained.ask, "/update_weights_from_distributed", status=400, **header)
        with contextlib.suppress(RuntimeError):  # to the sender it may look well
            dist.broadcast(torch.cat([norm, norm]), src=0, group=group)
        assert "more bytes came than were announced" in reply.result()["message"]
    dist.destroy_process_group(group)
    assert not receiver.is_running()
    trained.generate(text="1 + 1", sampling_params={"max_new_tokens": 4})
    assert trained.checksums() == before
    loop.push_broadcast(loop.Server(trained.url, None), weights, "once more")
    assert trained.checksums() == wanted
    assert trained.engine.children() == []


def test_a_receiver_that_is_killed_in_the_middle_of_a_broadcast_loses_its_group_and_no_weight(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    """Of a session that has written whole layers by then."""
    before, bits, loop = trained.checksums(), trained.bits(), _example()
    first, second = buckets(weights, 2)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(trained.ask, INIT, master_port=(port := free_port()), **PLACE)
        group = loop.join_group(port)
        reply.result()
        [receiver] = trained.engine.children()
        trained.ask(TENSOR, serialized_named_tensors=saved(first), flush_cache=False)
        assert trained.checksums() not in (before, wanted), "then this would show nothing"
        header = {
            "names": list(second),
            "dtypes": [str(tensor.dtype) for tensor in second.values()],
            "shapes": [list(tensor.shape) for tensor in second.values()],
        }
        reply = pool.submit(trained.ask, "/update_weights_from_distributed", status=400, **header)
        for tensor in list(second.values())[: len(second) // 2]:
            dist.broadcast(tensor, src=0, group=group)
        receiver.kill()
        refusal = reply.result()
    assert refusal["error"]["type"] == "invalid_request"
    assert "the process that receives has ended: code -9" in refusal["message"]
    dist.destroy_process_group(group)
    assert (trained.checksums(), trained.bits()) == (before, bits)
    assert trained.engine.is_running()
    assert trained.engine.children() == []
    loop.push_broadcast(loop.Server(trained.url, None), weights, "once more")
    assert trained.checksums() == wanted
    assert trained.engine.children() == []


def test_a_join_that_nobody_comes_to_is_ended_by_destroying_its_group(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_server(("127.0.0.1", 0)) as dumb,  # as a trainer that has hung
    ):
        port = dumb.getsockname()[1]
        reply = pool.submit(trained.ask, INIT, status=400, master_port=port, **PLACE)
        deadline = time.monotonic() + 30
        while not trained.engine.children():
            assert time.monotonic() < deadline
        trained.ask("/destroy_weights_update_group")
        assert "it was destroyed while it was being joined" in reply.result()["message"]
    assert trained.engine.children() == []
    loop = _example()
    loop.push_broadcast(loop.Server(trained.url, None), weights, "once more")
    assert trained.checksums() == wanted


def test_a_server_that_stops_leaves_no_process_behind(own_server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {**PLACE, "master_port": free_port()}
        reply = pool.submit(own_server.http.post, INIT, json=body)
        group = _example().join_group(body["master_port"])
        assert reply.result().status_code == 200
    [receiver] = own_server.engine.children()
    own_server.stop()
    psutil.wait_procs([receiver], timeout=5)
    assert not receiver.is_running()
    dist.destroy_process_group(group)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_with_and_without_a_session_the_same_weights_arrive(
    trained: TrainedServer, weights: dict[str, Tensor], wanted: dict[str, str]
) -> None:
    trained.ask("/begin_weight_update", selector="all")
    assert "open" in trained.ask("/begin_weight_update", status=400)["message"]
    for bucket in buckets(weights, 3):
        trained.ask(TENSOR, serialized_named_tensors=saved(bucket))
    trained.ask("/end_weight_update")
    trained.ask("/end_weight_update", status=400)
    assert trained.checksums() == wanted


def test_a_norm_changes_the_output_and_its_old_value_brings_it_back(
    trained: TrainedServer, demo_path: Path
) -> None:
    before, first = trained.bits(), trained.checksums()
    norm = load_file(demo_path / "model.safetensors")[NORM]
    trained.ask(TENSOR, serialized_named_tensors=saved({NORM: norm * 1.5}))
    assert trained.ask("/get_weights_by_name", name=NORM, truncate_size=3) == pytest.approx(
        (norm * 1.5)[:3].tolist()
    )
    changed = trained.checksums()
    assert [name for name in first if first[name] != changed[name]] == [NORM]
    assert trained.bits() != before
    trained.ask(TENSOR, serialized_named_tensors=saved({NORM: norm}))
    assert trained.bits() == before


def test_half_a_pair_is_an_error_at_the_end_and_never_served(
    trained: TrainedServer, weights: dict[str, Tensor]
) -> None:
    before, first = trained.bits(), trained.checksums()
    gate = saved({f"{EXPERT}.gate_proj.weight": weights[f"{EXPERT}.gate_proj.weight"]})
    reply = trained.ask(TENSOR, status=400, serialized_named_tensors=gate)
    assert "model.layers.2.mlp.experts" in reply["message"]
    assert (trained.checksums(), trained.bits()) == (first, before)
    trained.ask(TENSOR, serialized_named_tensors=gate, flush_cache=False)
    assert trained.reason() == "weights_inconsistent"
    assert trained.http.get("/health").status_code == 200
    trained.ask("/continue_generation", status=400)
    assert (trained.checksums(), trained.bits()) == (first, before)


def test_noise_is_not_served_until_every_weight_has_come(
    trained: TrainedServer, demo_path: Path, weights: dict[str, Tensor]
) -> None:
    trained.ask("/weights_checker", action="snapshot")
    trained.ask("/weights_checker", action="compare")
    trained.ask("/weights_checker", action="reset_tensors")
    assert trained.reason() == "weights_inconsistent"
    assert trained.ask("/weights_checker", status=400, action="compare")["success"] is False
    trained.ask(TENSOR, status=400, serialized_named_tensors=saved({NORM: weights[NORM]}))
    assert trained.reason() == "weights_inconsistent"
    trained.load_from(demo_path)
    trained.ask("/weights_checker", action="compare")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit",))


def test_a_malicious_or_senseless_payload_is_refused(trained: TrainedServer) -> None:
    first = trained.checksums()
    payloads = (
        pickle.dumps(Evil()),
        pickle.dumps([("a", Evil())]),
        pickle.dumps([(NORM, torch.zeros(3))]),
        pickle.dumps([("no.such.weight", torch.zeros(3))]),
        pickle.dumps({"flattened_tensor": torch.zeros(3), "metadata": []})[:-9],
        b"",
        b"\x80\x04N.",
    )
    for payload in payloads:
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
        for load_format in (None, "flattened_bucket", "os.system"):
            trained.ask(TENSOR, status=400, load_format=load_format, **body)
    assert trained.checksums() == first


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_requests_and_continuing_ends_it(
    trained: TrainedServer, other_path: Path, mode: str
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    with trained.http.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        twice(trained, "/pause_generation", mode=mode)
        assert trained.http.get("/health").status_code == 200
        assert trained.http.get("/ready").status_code == 503
        refusal = trained.http.get("/health_generate")
        assert (refusal.status_code, refusal.json()["error"]["type"]) == (503, "paused")
        with pytest.raises(httpx.ReadTimeout):  # it waits, and goes when its client goes
            trained.http.post("/generate", json={"text": "1"}, timeout=0.3)
        trained.load_from(other_path, weight_version="mid", flush_cache=mode == "retract")
        twice(trained, "/continue_generation")
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert ('"type":"abort"' in last) == (mode == "abort")
    assert ('"version":"mid"' in last) == (mode != "abort")
