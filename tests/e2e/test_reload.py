# SPDX-License-Identifier: Apache-2.0
"""New weights from a folder, under a running server: back and forth, under load, and broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from tetrarch.commands.checksum import measure
from tetrarch.config.cli import read_keywords
from tetrarch.config.launch import plan_launch
from tetrarch.memory.checksum import combine
from tetrarch.models.describe import describe

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from conftest import TrainedServer

CLIENTS = 64


def offline(path: Path) -> dict[str, str]:
    """What `tetrarch checksum --quantization nvfp4_online` says of a folder."""
    said = {"model": str(path), "quantization": "nvfp4_online", "threads": 1, "device": "cpu"}
    return measure(plan_launch(read_keywords(said, environ={}), describe=describe))


@pytest.mark.parametrize("flush", [True, False])
def test_memory_is_lent_and_weights_come_back_bit_for_bit(
    trained: TrainedServer, flush: bool
) -> None:
    before, path = trained.bits(), trained.http.get("/model_info").json()["model_path"]
    lent = trained.ask("/release_memory_occupation")
    assert set(lent["released"]) == {"weights", "kv_cache", "cuda_graph"}
    assert lent["num_bytes"]["weights"] > 10_000_000
    assert trained.reason() == "weights_released"
    assert trained.http.get("/health").status_code == 200
    assert trained.http.get("/health_generate").status_code == 503
    trained.ask("/resume_memory_occupation", tags=["weights"])
    assert trained.reason() == "weights_not_loaded"
    trained.load_from(path, abort_all_requests=False, flush_cache=flush)
    assert trained.reason() == "kv_released"
    back = trained.ask("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    assert set(back["state"].values()) == {"resident"}
    assert trained.http.get("/model_info").json()["model_path"] == path
    assert trained.bits() == before


def test_kept_weights_need_no_update(trained: TrainedServer) -> None:
    before = trained.bits(), trained.checksums()
    trained.ask("/release_memory_occupation", cpu_backup=True)
    trained.ask("/resume_memory_occupation")
    assert (trained.bits(), trained.checksums()) == before


def test_another_checkpoint_and_back(
    trained: TrainedServer, demo_path: Path, other_path: Path
) -> None:
    [card] = trained.http.get("/v1/models").json()["data"]
    first, before = trained.checksums(), trained.bits()
    assert first == offline(demo_path)
    reply = trained.load_from(other_path, weight_version="step 1")
    assert reply["weight_version"] == "step 1"
    assert reply["atomic"] is True
    assert reply["num_paused_requests"] == 0
    told = trained.ask("/weights_checker")
    assert told["checksums"] == offline(other_path)
    assert told["per_engine_checksum"] == combine(told["checksums"])
    assert trained.bits() != before
    info = trained.http.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(other_path), "step 1")
    assert trained.http.get("/v1/models").json()["data"] == [{**card, "root": str(other_path)}]
    trained.load_from(demo_path)
    assert trained.checksums() == first
    assert trained.bits() == before
    assert trained.http.get("/v1/models").json()["data"] == [card]


def test_five_reloads_in_a_row(trained: TrainedServer, demo_path: Path) -> None:
    before = trained.bits()
    for _ in range(5):
        trained.load_from(demo_path)
        assert trained.bits() == before


def test_a_reload_under_load_loses_no_request(
    trained: TrainedServer, demo_path: Path, other_path: Path
) -> None:
    def stream(index: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        return trained.events(input_ids=[5, 6, index], sampling_params=sampling)[-1]

    versions = ["load 1", "load 2", "load 3"]
    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(stream, index) for index in range(CLIENTS)]
        trained.wait_for(lambda load: load["num_running_reqs"] > 4, seconds=20)
        for path, version in zip((other_path, demo_path, other_path), versions, strict=True):
            trained.load_from(path, weight_version=version, flush_cache=version != "load 2")
        last = [future.result(120) for future in futures]
    spans = [event["meta_info"]["weight_versions"] for event in last]
    for event, one in zip(last, spans, strict=True):
        assert event["meta_info"]["finish_reason"] == {"type": "length", "length": 48}
        assert len(event["output_ids"]) == 48
        assert [one[0]["start"], *(span["end"] for span in one)] == [
            *(span["start"] for span in one),
            48,
        ]
    assert any(len(one) > 1 for one in spans)  # some lived through an update
    assert len({span["version"] for one in spans for span in one}) > 1


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return write


EXPERT = "model.layers.3.mlp.experts.5.up_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.gates.weight"] = tensors.pop(GATE)


def lose_config(file: Path) -> None:
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps({**config, "hidden_size": 512}))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(truncate, "model.safetensors", id="truncated"),
        pytest.param(edit(lambda t: t.pop(EXPERT)), EXPERT, id="missing expert"),
        pytest.param(edit(rename), GATE, id="renamed"),
        pytest.param(edit(lambda t: t.update({GATE: t[GATE][:4].clone()})), GATE, id="wrong shape"),
        pytest.param(lose_config, "hidden_size", id="other model"),
    ],
)
def test_a_broken_checkpoint_changes_nothing(
    trained: TrainedServer,
    other_path: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    named: str,
) -> None:
    before = trained.checksums(), trained.bits(), trained.http.get("/model_info").json()
    folder = tmp_path / "broken"
    shutil.copytree(other_path, folder)
    spoil(folder / "model.safetensors")
    reply = trained.ask("/update_weights_from_disk", status=400, model_path=str(folder))
    assert reply["success"] is False
    assert named in reply["message"]
    after = trained.checksums(), trained.bits(), trained.http.get("/model_info").json()
    assert after == before
