# SPDX-License-Identifier: Apache-2.0
"""What goes wrong elsewhere when weights change under a running server: one test for each.

H1 to H9 were found by reading SGLang's source, R and M in public bug reports. A test's name begins
with its case; `NEEDS_A_GPU` says why the others are not here.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tetrarch.commands.checksum import measure
from tetrarch.core.errors import CheckpointError, ConfigError, RequestError
from tetrarch.core.specs import TensorSpec
from tetrarch.engine.actions import (
    BeginUpdate,
    Continue,
    EndUpdate,
    Pause,
    Release,
    Resume,
    UpdateFromDisk,
)
from tetrarch.memory.journal import Journal
from tetrarch.memory.saver import FixedArena
from tetrarch.models.sources import SafetensorsSource
from tetrarch.serve.door import Door
from tetrarch.serve.info import models
from tetrarch.serve.weights import choose

if TYPE_CHECKING:
    from conftest import Live

Start = Callable[..., Any]
Tensors = dict[str, Tensor]
NEEDS_A_GPU = {
    "R11": "constants that a captured graph reads after a reload: there are no graphs on a CPU",
    "M2": "a release with captured graphs: there are no graphs on a CPU",
    "M4": "another process takes the device memory right after the reply: there is none",
}
CASES = [
    *(f"H{number}" for number in range(1, 10)),
    *(f"R{number}" for number in range(1, 12)),
    *(f"M{number}" for number in range(1, 6)),
]
FILE, NORM = "model.safetensors", "model.norm.weight"
LAYER = "model.layers.1.mlp.experts"
DRAFT, MTP = "mtp.layers.0.mlp.experts", {"speculative_algorithm": "mtp"}
EXPERT, ROUTER = f"{LAYER}.3.up_proj.weight", "model.layers.0.mlp.gate.weight"
ORDERS = (
    *("-* -* +*", "+* -* +*", "-w +w +w", "-k +k -k +k", "-k -w +w +k", "-w -k -g +g +k +w"),
    *("+w -w -w +k +w", "-g +g +g", "-x -w +x +w", "-* +w +k +g", "-* +g +k +w +*", "-kw +* +x"),
)
TAGS = {"w": "weights", "k": "kv_cache", "g": "cuda_graph", "x": "vram"}


@pytest.fixture
def paths(tiny_checkpoint: Callable[..., Any], tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints A and B of one model; a test may damage them."""
    sizes = {"num_hidden_layers": 2, "num_experts": 4}
    made = [tiny_checkpoint("qwen3_moe", seed=seed, **sizes).path for seed in (0, 1)]
    return shutil.copytree(made[0], tmp_path / "A"), shutil.copytree(made[1], tmp_path / "B")


@pytest.fixture
def new(paths: tuple[Path, Path]) -> Tensors:
    """What B holds."""
    return load_file(paths[1] / FILE)


@pytest.fixture
def server(live: Start, paths: tuple[Path, Path]) -> Live:
    return live(paths[0])


def reload(server: Live, path: Path, **fields: Any) -> None:
    reply = server.ask(UpdateFromDisk, path=str(path), **fields)
    assert reply.ok, reply.message


def damage(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def refuse(server: Live, path: Path) -> str:
    """Return why a reload is refused; everything is as it was."""
    before = server.store.checksums(), server.say(), server.engine.heartbeat().model_path
    reply = server.ask(UpdateFromDisk, path=str(path))
    assert (reply.ok, reply.status) == (False, 400)
    assert (server.store.checksums(), server.say(), server.engine.heartbeat().model_path) == before
    return reply.message


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_every_case_is_tested_or_needs_a_gpu() -> None:
    names = [name for name in globals() if name.startswith("test_")]
    found = {m[1].upper() for name in names if (m := re.match(r"test_([hrm]\d+)_", name))}
    assert found | set(NEEDS_A_GPU) == set(CASES)
    assert not found & set(NEEDS_A_GPU)


def test_h1_interleaved_pairs_are_put_in_order_on_every_load(
    live: Start, tiny_checkpoint: Callable[..., Any]
) -> None:
    """No flag remembers that it was done: gpt-oss stores gate and up row by row."""
    made = [tiny_checkpoint("gpt_oss", seed=seed).path for seed in (0, 1)]
    told = [live(path, quantization="none").store.checksums() for path in made]
    server = live(made[0], quantization="none")
    for turn in (1, 0, 0, 1):
        reload(server, made[turn])
        assert server.store.checksums() == told[turn]
    assert told[0] != told[1]


def test_h2_layers_that_received_nothing_are_not_transformed_again(
    server: Live, live: Start, paths: tuple[Path, Path], new: Tensors
) -> None:
    old, told = server.store.checksums(), live(paths[1]).store.checksums()
    layer = {name: tensor for name, tensor in new.items() if name.startswith(LAYER)}
    for _ in range(3):
        assert server.push(layer).ok
        after = server.store.checksums()
        changed = {name for name in differing(old, told) if name.startswith(LAYER)}
        assert differing(old, after) == changed != set()
        assert all(after[name] == told[name] for name in changed)


def test_h3_serialized_weights_are_packed_again_where_they_lie(
    live: Start, paths: tuple[Path, Path], quantized: Callable[[Path], Path]
) -> None:
    """What the runner made of them, decoded copies too, is replaced with them."""
    first, second = quantized(paths[0]), quantized(paths[1])
    server, other = (live(path, quantization="modelopt_fp4") for path in (first, second))
    places, says = server.addresses(), server.say()
    for path, told in ((second, other.say()), (first, says), (second, other.say())):
        reload(server, path)
        assert server.say() == told
    assert says != other.say()
    assert server.addresses() == places


def test_h4_half_a_pair_of_a_failed_update_waits_for_nobody(server: Live, new: Tensors) -> None:
    """The up of the next update must not find the gate of the last one."""
    before = server.store.checksums()
    layer = {name: tensor for name, tensor in new.items() if name.startswith(LAYER)}
    gates = {name: tensor for name, tensor in layer.items() if "gate_proj" in name}
    rest = {name: tensor for name, tensor in layer.items() if "gate_proj" not in name}
    for half, lacks in ((gates, "up of expert 0"), (rest, "gate of expert 0")):
        reply = server.push(half)
        assert (reply.ok, reply.status) == (False, 400)
        assert lacks in reply.message
        assert server.store.unfinished() == []
    assert server.store.checksums() == before


@pytest.fixture
def drafted(paths: tuple[Path, Path], tiny: Any) -> tuple[Path, Path]:
    """A and B, each with a draft layer of its own."""
    for seed, path in enumerate(paths):
        tiny.add_draft_layers(path, seed=seed)
    return paths


def test_h5_target_and_draft_are_replaced_as_one(live: Start, drafted: Any) -> None:
    told = [live(path, **MTP).store.checksums() for path in drafted]
    server = live(drafted[0], **MTP)
    says, places = server.say(), server.addresses()
    assert measure(server.plan) == told[0]  # what `tetrarch checksum` says
    assert {name for name in differing(*told) if name.startswith("mtp.")} > {"mtp.fc.weight"}
    for turn in (1, 1, 0):
        reload(server, drafted[turn])
        assert server.store.checksums() == told[turn]
    assert (server.say(), server.addresses()) == (says, places)
    assert server.ask(Release).ok
    assert server.ask(Resume).ok
    reload(server, drafted[0])  # its memory was lent like any other
    assert (server.say(), server.store.checksums()) == (says, told[0])


@pytest.mark.parametrize("name", ["mtp.fc.weight", f"{DRAFT}.2.down_proj.weight"])
def test_h5_a_checkpoint_without_a_draft_tensor_changes_neither(
    live: Start, drafted: Any, name: str
) -> None:
    server = live(drafted[0], **MTP)
    damage(drafted[1], lambda tensors: tensors.pop(name))
    assert name.removesuffix(".weight") in refuse(server, drafted[1])


def test_h5_a_failure_while_the_draft_is_written_restores_both(
    live: Start, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = live(drafted[0], **MTP)
    kept: list[int] = []

    def fail(_: object, journal: Journal) -> None:
        kept.append(journal.num_kept_bytes)
        raise OSError("the disk has gone")

    monkeypatch.setattr(vars(server.rank)["_model"].experts[DRAFT], "load", fail)
    assert "the disk has gone" in refuse(server, drafted[1])
    assert kept > [server.store.num_bytes // 2]  # the target was written by then
    monkeypatch.undo()
    reload(server, drafted[1])
    assert server.store.checksums() == live(drafted[1], **MTP).store.checksums()


@pytest.mark.parametrize("selector", ["draft", "target", "all"])
def test_h5_tensors_reach_the_model_that_is_selected(
    live: Start, drafted: Any, selector: str
) -> None:
    server, told = live(drafted[0], **MTP), live(drafted[1], **MTP).store.checksums()
    before, tensors = server.store.checksums(), load_file(drafted[1] / FILE)
    drafts = {name for name in differing(before, told) if name.startswith("mtp.")}
    wanted = {"draft": drafts, "target": differing(before, told) - drafts}
    assert server.ask(BeginUpdate, selector=selector).ok
    assert server.push(tensors).ok
    assert server.ask(EndUpdate).ok
    changed = differing(before, server.store.checksums())
    assert changed == wanted.get(selector, differing(before, told))


def test_h5_a_draft_that_is_not_served_cannot_be_selected() -> None:
    door: Any = SimpleNamespace(plan=SimpleNamespace(spec=None))
    with pytest.raises(RequestError, match="no draft model is served"):
        choose(door, "draft")
    assert choose(door, None, disable_draft_model=True) == "target"
    with pytest.raises(RequestError, match="disable_draft_model"):
        choose(SimpleNamespace(plan=SimpleNamespace(spec=MTP)), "draft", disable_draft_model=True)


def test_h6_nothing_that_a_graph_reads_moves_so_none_is_captured_again(
    server: Live, paths: tuple[Path, Path], new: Tensors
) -> None:
    places = server.addresses()
    reload(server, paths[1])
    reload(server, paths[0], flush_cache=False)
    assert server.push(new).ok
    new[EXPERT][0, 0] = torch.inf
    assert not server.push(new).ok  # written half-way, and taken back
    server.ask(Release)
    server.ask(Resume)
    reload(server, paths[0])
    assert server.addresses() == places


def test_h7_a_load_format_is_that_of_one_call(server: Live, new: Tensors) -> None:
    norm = {NORM: new[NORM]}
    assert server.push(norm, load_format="direct").ok
    refused = server.push(norm, load_format="flattened_bucket")
    assert (refused.ok, refused.status) == (False, 400)
    assert server.push(norm).ok
    assert server.push(norm, load_format=None).ok


def test_h8_every_request_has_spans_without_gaps(server: Live, paths: tuple[Path, Path]) -> None:
    """One that decodes, one in the middle of its prompt, one that waits."""
    prompts = {"decodes": 5, "reads": 60, "waits": 20}
    for rid, size in prompts.items():
        if rid == "waits":
            server.ask(Pause, mode="in_place")
        server.send(server.request(rid, prompt=tuple(range(3, 3 + size)), count=8), turns=2)
    reload(server, paths[1], weight_version="v1")
    server.ask(Continue)
    server.run()
    spans = {rid: server.last(rid).versions for rid in prompts}
    for found in spans.values():
        assert [0, *(span.end for span in found)] == [*(span.start for span in found), 8]
        assert found[-1].version == "v1"
    assert [span.version for span in spans["decodes"]] == ["default", "v1"]
    assert [len(spans["reads"]), len(spans["waits"])] == [1, 1]


def test_h9_a_mix_answers_503_until_a_full_update_has_come(
    server: Live, paths: tuple[Path, Path], new: Tensors
) -> None:
    damage(paths[1], lambda tensors: tensors[EXPERT].fill_(torch.nan))
    reply = server.ask(UpdateFromDisk, path=str(paths[1]), atomic=False)
    assert (reply.status, reply.code) == (400, "weights_inconsistent")
    for rid in ("a", "b"):
        server.send(server.request(rid, prompt=(5, 6), count=2))
        finish = server.last(rid).finish
        assert finish is not None
        assert (finish.status, finish.code) == (503, "weights_inconsistent")
        assert not server.push({NORM: new[NORM]}).ok, "one tensor is not a full update"
    assert server.push(new).ok
    assert len(server.say()[0]) == 12


def test_r1_the_same_weights_again_give_the_same_bits(
    server: Live, paths: tuple[Path, Path]
) -> None:
    before, places = server.say(), server.addresses()
    reload(server, paths[0])
    assert (server.say(), server.addresses()) == (before, places)


def test_r2_other_weights_and_back(server: Live, paths: tuple[Path, Path]) -> None:
    before = server.say(), server.store.checksums()
    reload(server, paths[1])
    other = server.say(), server.store.checksums()
    reload(server, paths[0])
    assert (server.say(), server.store.checksums()) == before
    assert other[0] != before[0]
    assert len(differing(before[1], other[1])) > 10


def test_r3_five_reloads_in_a_row(server: Live, paths: tuple[Path, Path]) -> None:
    says = {0: server.say()}
    for turn in (1, 0, 1, 0, 1):
        reload(server, paths[turn])
        assert server.say() == says.setdefault(turn, server.say())
    assert says[0] != says[1]


def test_r4_a_truncated_shard_changes_nothing(server: Live, paths: tuple[Path, Path]) -> None:
    file = paths[1] / FILE
    file.write_bytes(file.read_bytes()[:-1000])
    assert FILE in refuse(server, paths[1])


def test_r5_a_tensor_of_another_shape_changes_nothing(
    server: Live, paths: tuple[Path, Path]
) -> None:
    damage(paths[1], lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:, :32].clone()}))
    assert EXPERT.removesuffix(".weight") in refuse(server, paths[1])


def test_r6_a_model_of_another_size_is_refused_by_its_headers(
    server: Live, tiny_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_checkpoint("qwen3_moe", hidden_size=128, num_hidden_layers=2, num_experts=4).path
    monkeypatch.setattr(SafetensorsSource, "read", None)
    began = time.process_time()
    with pytest.raises(CheckpointError, match="hidden_size"):
        server.store.plan(str(other), atomic=None)
    assert time.process_time() - began < 1


def test_r7_missing_and_renamed_tensors_are_named(server: Live, paths: tuple[Path, Path]) -> None:
    damage(paths[1], lambda tensors: tensors.pop(EXPERT))
    assert EXPERT.removesuffix(".weight") in refuse(server, paths[1])
    damage(paths[0], lambda tensors: tensors.update({"model.gates": tensors.pop(ROUTER)}))
    message = refuse(server, paths[0])
    assert "model.gates" in message
    assert ROUTER in message


def test_r8_the_served_name_survives_and_the_path_follows(
    server: Live, paths: tuple[Path, Path]
) -> None:
    """As `/v1/models` tells them."""

    def card() -> Any:
        client: Any = SimpleNamespace(load=server.engine.heartbeat())
        nobody: Any = None
        door = Door(plan=server.plan, client=client, tokenizer=nobody, metrics=nobody, created=1)
        [found] = json.loads(asyncio.run(models(door, nobody)).body)["data"]
        return found

    before = card()
    assert before["root"] == str(paths[0])
    for turn in (1, 0, 1):
        reload(server, paths[turn])
        assert card() == {**before, "root": str(paths[turn])}


@pytest.mark.parametrize("begins", [True, False])
def test_r9_with_and_without_a_session_the_same_weights_arrive(
    server: Live, live: Start, paths: tuple[Path, Path], new: Tensors, begins: bool
) -> None:
    names = sorted(new, key=lambda name: ("up_proj" in name, name))
    half = len(names) // 2
    if begins:
        assert server.ask(BeginUpdate).ok
    assert server.push({name: new[name] for name in names[:half]}, flush_cache=False).ok
    assert server.push({name: new[name] for name in names[half:]}, flush_cache=not begins).ok
    assert not begins or server.ask(EndUpdate).ok
    assert not server.store.is_open
    assert server.store.checksums() == live(paths[1]).store.checksums()


def test_r10_a_norm_changes_what_is_said_and_its_old_value_brings_it_back(
    server: Live, paths: tuple[Path, Path]
) -> None:
    norm, before = load_file(paths[0] / FILE)[NORM], server.say()
    assert server.push({NORM: norm * 1.5}).ok
    assert server.say() != before
    assert server.push({NORM: norm}).ok
    assert server.say() == before


def test_m1_memory_that_cannot_be_returned_is_a_refusal_and_names_the_flag() -> None:
    """How much a device gets back is measured on a GPU; on a CPU in tests/memory/test_arena.py."""
    arena = FixedArena()
    arena.empty(TensorSpec((4,), torch.float32, torch.device("cpu")))
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        arena.release()
    assert not arena.is_released


@pytest.mark.parametrize("order", ORDERS)
def test_m3_any_order_of_releases_and_resumes_is_answered(
    server: Live, paths: tuple[Path, Path], order: str
) -> None:
    before = server.say()
    for move in order.split():
        letters = "" if move[1:] == "*" else move[1:]
        tags = tuple(TAGS[letter] for letter in letters)
        reply = server.ask(Release if move[0] == "-" else Resume, tags=tags)
        assert (reply.ok, reply.status) == ((False, 400) if "x" in letters else (True, 200))
    server.ask(Resume)
    reload(server, paths[0])
    assert server.say() == before


def test_m5_memory_is_not_taken_from_under_a_long_prompt(server: Live) -> None:
    server.send(server.request("a", prompt=tuple(range(3, 103)), count=3))  # 16 tokens a step
    for tags in ((), ("kv_cache",), ("weights",)):
        reply = server.ask(Release, tags=tags)
        assert (reply.ok, reply.status, reply.code) == (False, 400, "busy")
    server.run()
    finish = server.last("a").finish
    assert finish is not None
    assert finish.kind == "length"
    assert server.ask(Release).ok
