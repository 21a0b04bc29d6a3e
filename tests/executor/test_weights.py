# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced are the new ones or the old ones, bit for bit, or nobody uses them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tetrarch.core.errors import CheckpointError, ConfigError, RequestError
from tetrarch.executor.executor import KV_RELEASED, READY, Executor
from tetrarch.executor.updates import WeightsState
from tetrarch.executor.weights import WeightStore
from tetrarch.memory import journal
from tetrarch.memory.slots import Region, SlotTable
from tetrarch.models.sources import SafetensorsSource
from tetrarch.models.writer import WeightWriter

Serve = Callable[..., list[list[int]]]
Start = Callable[..., Executor]
Tensors = dict[str, Tensor]
PROMPTS = [[5, 3, 8, 200, 17], [9] * 20]
SIZES = {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 256}
FILE = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3"


def read(folder: Path) -> Tensors:
    return load_file(folder / FILE)


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})


@pytest.fixture
def paths(tiny_checkpoint: Callable[..., Any], tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of one model, A and B; both may be damaged or deleted."""
    found: list[Path] = []
    for seed, name in enumerate("AB"):
        made = tiny_checkpoint("qwen3_moe", seed=seed, **SIZES).path
        found.append(Path(shutil.copytree(made, tmp_path / name)))
    return found[0], found[1]


@pytest.fixture
def executor(start: Start, paths: tuple[Path, Path]) -> Executor:
    return start(paths[0])


@pytest.fixture
def store(executor: Executor) -> WeightStore:
    return executor.weights


def addresses(executor: Executor) -> list[dict[str, int]]:
    model = vars(executor)["_model"]
    tables = [model.weights, *(layer.weights for layer in model.experts.values())]
    return [table.addresses() for table in tables]


def with_free_host(store: WeightStore, free: int) -> None:
    vars(store)["_free_host"] = lambda: free


def add(store: WeightStore, tensors: Mapping[str, Tensor]) -> None:
    store.take(store.receive(tensors))


def reload(store: WeightStore, path: Path, *, atomic: bool | None = None) -> Any:
    return store.commit(store.plan(str(path), atomic=atomic))


def test_there_and_back_again_is_the_same_model_at_the_same_addresses(
    start: Start, executor: Executor, paths: tuple[Path, Path], serve: Serve
) -> None:
    store = executor.weights
    fresh = [start(path) for path in paths]
    told = [one.weights.checksums() for one in fresh]
    says = [serve(one, PROMPTS, num_new=12, chunk_tokens=8) for one in fresh]
    assert told[0] != told[1]
    assert says[0] != says[1]
    places = addresses(executor)
    for turn in (1, 0, 1, 1, 0):
        report = reload(store, paths[turn])
        assert (report.atomic, report.num_tensors) == (True, len(read(paths[turn])))
        assert store.path == str(paths[turn])
        assert store.checksums() == told[turn]
        assert serve(executor, PROMPTS, num_new=12, chunk_tokens=8) == says[turn]
    assert addresses(executor) == places


def damage(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:, :32]}), "lm_head.weight"),
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight"), f"{EXPERT}.up_proj"),
        (
            lambda t: t.update({f"{EXPERT}.upper.weight": t.pop(f"{EXPERT}.up_proj.weight")}),
            f"{EXPERT}.upper",
        ),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].int()}), "model.norm"),
        (lambda t: t.update({"model.layers.1.extra.weight": torch.ones(64)}), "layers.1.extra"),
    ],
)
def test_what_headers_tell_is_refused_before_anything_is_read(
    store: WeightStore,
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tensors], object],
    words: str,
) -> None:
    before = store.checksums()
    damage(paths[1], change)
    monkeypatch.setattr(SlotTable, "write_", forbidden)
    monkeypatch.setattr(SafetensorsSource, "read", forbidden)
    with pytest.raises(CheckpointError, match=words):
        store.plan(str(paths[1]), atomic=None)
    assert (store.state, store.path, store.checksums()) == ("ready", str(paths[0]), before)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("nothing is read or written while an update is planned")


@pytest.mark.parametrize("path", ["/nowhere", "", "a\0b", "x" * 5000, "/etc/hostname", "/"])
def test_a_path_that_is_no_checkpoint_is_refused(store: WeightStore, path: str) -> None:
    with pytest.raises(CheckpointError):
        store.plan(path, atomic=None)
    assert store.state is WeightsState.READY


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x07\0\0\0\0\0\0\0{"a":1}',
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(
    store: WeightStore, paths: tuple[Path, Path], content: bytes
) -> None:
    (paths[1] / FILE).write_bytes(content)
    with pytest.raises(CheckpointError):
        store.plan(str(paths[1]), atomic=None)


def test_another_configuration_is_refused(store: WeightStore, paths: tuple[Path, Path]) -> None:
    config = json.loads((paths[1] / "config.json").read_text())
    (paths[1] / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        store.plan(str(paths[1]), atomic=None)


class Fault:
    """Fails the nth time that it is called, in place of a function that it otherwise calls."""

    def __init__(self, target: Callable[..., Any], error: BaseException, *, at: int) -> None:
        self.target, self.error, self.left = target, error, at

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return lambda *args, **kw: self(instance, *args, **kw)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.target(*args, **kw)


def shrink(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Somebody cuts the file short while it is being read."""
    read_some, left = os.preadv, [30]

    def preadv(number: int, *rest: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            os.truncate(f"/proc/self/fd/{number}", 5000)
        return read_some(number, *rest)

    patch.setattr(os, "preadv", preadv)


def break_disk(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "preadv", Fault(os.preadv, OSError(5, "Input/output error"), at=30))


def exhaust_host(_: Path, patch: pytest.MonkeyPatch) -> None:
    """No memory for the old contents of the twentieth slot."""
    patch.setattr(journal, "_host_copy", Fault(vars(journal)["_host_copy"], MemoryError(), at=20))


def exhaust_stage(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightWriter, "take", Fault(WeightWriter.take, RuntimeError("no memory"), at=30))


def spoil_one(_: Path, patch: pytest.MonkeyPatch) -> None:
    """A write that does not arrive: only reading back can tell."""
    patch.setattr(SlotTable, "write_", Spoiled(SlotTable.write_))


class Spoiled:
    def __init__(self, target: Callable[..., None]) -> None:
        self.target = target
        self.count = 0

    def __get__(self, instance: SlotTable, owner: type) -> Callable[..., None]:
        return partial(self.write, instance)

    def write(self, table: SlotTable, name: str, value: Tensor, rows: slice | None = None) -> None:
        self.count += 1
        self.target(table, name, value, rows)
        if self.count == 7:
            table[name].view(-1).view(torch.uint8)[0] ^= 1


FAULTS = [shrink, break_disk, exhaust_host, exhaust_stage, spoil_one]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_half_way_restores_the_old_weights(
    executor: Executor,
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    serve: Serve,
    fault: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    """Both checkpoints are gone by then: nothing is read again to go back."""
    store = executor.weights
    before, says = store.checksums(), serve(executor, PROMPTS, num_new=8, chunk_tokens=8)
    update = store.plan(str(paths[1]), atomic=None)
    assert update.atomic
    with monkeypatch.context() as patch:
        fault(paths[1], patch)
        shutil.rmtree(paths[0])
        for file in paths[1].iterdir():
            file.unlink()
        writes = Counter(patch)
        with pytest.raises(CheckpointError, match="the old weights are served"):
            store.commit(update)
        assert writes.count > 10, "the fault came before anything was written"
    assert (store.state, store.path) == (WeightsState.READY, str(paths[0]))
    assert store.checksums() == before
    assert serve(executor, PROMPTS, num_new=8, chunk_tokens=8) == says


class Counter:
    """Counts writes to slots."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        write = journal.Journal.write

        def counted(*args: Any) -> None:
            self.count += 1
            write(*args)

        patch.setattr(journal.Journal, "write", counted)


def test_scales_that_are_not_finite_restore_the_old_weights(
    start: Start, paths: tuple[Path, Path], quantized: Callable[..., Path]
) -> None:
    first, second = (quantized(path, "nvfp4_modelopt") for path in paths)
    executor = start(first, quantization="modelopt_fp4")
    before = executor.weights.checksums()
    bad = f"{EXPERT}.down_proj.weight_scale_2"
    damage(second, lambda tensors: tensors.update({bad: torch.tensor(torch.nan)}))
    with pytest.raises(CheckpointError, match="the old weights are served"):
        reload(executor.weights, second)
    assert executor.weights.checksums() == before
    assert executor.weights.state is WeightsState.READY


def test_without_room_for_an_undo_copy_the_plan_says_so(
    store: WeightStore, paths: tuple[Path, Path]
) -> None:
    with_free_host(store, 1000)
    assert store.plan(str(paths[1]), atomic=None).atomic is False
    with pytest.raises(ConfigError, match="does not fit in host memory"):
        store.plan(str(paths[1]), atomic=True)
    assert reload(store, paths[1]).atomic is False


@pytest.mark.parametrize("fault", [one for one in FAULTS if one is not exhaust_host])
def test_without_an_undo_copy_a_failure_is_admitted_and_a_full_update_rescues(
    store: WeightStore,
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    before = store.checksums()
    update = store.plan(str(paths[1]), atomic=False)
    with monkeypatch.context() as patch:
        fault(paths[1], patch)
        with pytest.raises(CheckpointError, match="a full update must follow"):
            store.commit(update)
    assert store.state is WeightsState.INCONSISTENT
    store.begin()
    add(store, {"model.norm.weight": read(paths[0])["model.norm.weight"]})
    with pytest.raises(CheckpointError, match="not sent"):
        store.finish()
    assert store.state is WeightsState.INCONSISTENT
    reload(store, paths[0])
    assert (store.state, store.checksums()) == (WeightsState.READY, before)


def test_an_undo_that_fails_is_admitted_too(
    store: WeightStore, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.checksums()
    update = store.plan(str(paths[1]), atomic=True)
    with monkeypatch.context() as patch:
        shrink(paths[1], patch)
        patch.setattr(journal.Journal, "undo", Fault(journal.Journal.undo, OSError(), at=1))
        with pytest.raises(CheckpointError, match="a full update must follow"):
            store.commit(update)
    assert store.state is WeightsState.INCONSISTENT
    reload(store, paths[0])
    assert (store.state, store.checksums()) == (WeightsState.READY, before)


def calls(tensors: Tensors, *, last: Callable[[str], bool]) -> list[Tensors]:
    """Two calls: everything else, then what `last` chooses."""
    return [
        {name: value for name, value in tensors.items() if last(name) is turn}
        for turn in (False, True)
    ]


def test_received_tensors_touch_nothing_until_they_are_taken(
    store: WeightStore, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.checksums()
    with monkeypatch.context() as patch:
        patch.setattr(SlotTable, "write_", forbidden)
        received = store.receive(read(paths[1]))
    assert not store.is_open
    assert store.checksums() == before
    store.take(received)
    assert store.is_open
    assert store.finish() is not None
    assert store.checksums() != before


@pytest.mark.parametrize(
    ("word", "is_half"),
    [("up_proj", True), (".experts.2.", True), ("layers.1.", False), ("norm", False)],
)
def test_tensors_in_two_calls_give_the_weights_of_a_fresh_load(
    start: Start, store: WeightStore, paths: tuple[Path, Path], word: str, is_half: bool
) -> None:
    """Unquantized tensors become NVFP4 on the way in, with the bytes that a file gives."""
    told = start(paths[1]).weights.checksums()
    first, second = calls(read(paths[1]), last=lambda name: word in name)
    store.begin()
    add(store, first)
    assert bool(store.unfinished()) is is_half
    add(store, first)  # a client that timed out
    add(store, second)
    assert store.unfinished() == []
    report = store.finish()
    assert report is not None
    assert (report.num_tensors, report.atomic) == (len(read(paths[1])), True)
    assert store.checksums() == told


def test_bf16_tensors_for_online_experts_give_the_weights_of_a_fresh_load(
    start: Start, store: WeightStore, paths: tuple[Path, Path]
) -> None:
    halves = {name: value.bfloat16() for name, value in read(paths[1]).items()}
    write(paths[1], halves)
    told = start(paths[1]).weights.checksums()
    add(store, halves)
    store.finish()
    assert store.checksums() == told


def test_an_fp8_weight_may_come_before_its_scale(
    start: Start, paths: tuple[Path, Path], quantized: Callable[..., Path]
) -> None:
    first, second = (quantized(path, "fp8_block") for path in paths)
    store = start(first).weights
    told = start(second).weights.checksums()
    weights, scales = calls(read(second), last=lambda name: name.endswith("_scale_inv"))
    add(store, weights)
    assert any("without its weight_scale_inv" in words for words in store.unfinished())
    add(store, scales)
    store.finish()
    assert store.checksums() == told


@pytest.mark.parametrize("word", ["up_proj", ".experts.3."])
def test_a_half_complete_layer_at_the_end_restores_the_old_weights(
    store: WeightStore, paths: tuple[Path, Path], word: str
) -> None:
    before = store.checksums()
    store.begin()
    add(store, calls(read(paths[1]), last=lambda name: word in name)[0])
    with pytest.raises(CheckpointError, match=r"half-complete(.|\n)*the old weights are served"):
        store.finish()
    assert (store.state, store.is_open, store.checksums()) == ("ready", False, before)
    assert store.finish() is None


def test_a_half_complete_layer_without_an_undo_copy_is_admitted(
    start: Start, store: WeightStore, paths: tuple[Path, Path]
) -> None:
    told = start(paths[1]).weights.checksums()
    assert store.begin(atomic=False) is False
    add(store, calls(read(paths[1]), last=lambda name: "up_proj" in name)[0])
    with pytest.raises(CheckpointError, match="a full update must follow"):
        store.finish()
    assert store.state is WeightsState.INCONSISTENT
    add(store, read(paths[1]))  # every tensor again: a new update
    assert store.finish() is not None
    assert (store.state, store.checksums()) == (WeightsState.READY, told)


def test_a_call_that_does_not_fit_changes_nothing_and_the_update_goes_on(
    start: Start, store: WeightStore, paths: tuple[Path, Path]
) -> None:
    before, told = store.checksums(), start(paths[1]).weights.checksums()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        add(store, {"model.norm.weight": torch.ones(63)})
    assert (store.is_open, store.checksums()) == (False, before)
    first, second = calls(read(paths[1]), last=lambda name: "up_proj" in name)
    add(store, first)
    for bad in ({"model.nothing": torch.ones(1)}, {f"{EXPERT}.up_proj.weight": torch.ones(32, 63)}):
        with pytest.raises(CheckpointError):
            add(store, {**second, **bad})
        assert store.is_open
    add(store, second)
    store.finish()
    assert store.checksums() == told


def test_values_that_cannot_be_weights_end_the_update(
    store: WeightStore, paths: tuple[Path, Path]
) -> None:
    before, tensors = store.checksums(), read(paths[1])
    store.begin()
    add(store, {name: value for name, value in tensors.items() if "layers.0" in name})
    tensors[f"{EXPERT}.up_proj.weight"][0, 0] = torch.inf
    with pytest.raises(CheckpointError, match="the old weights are served"):
        add(store, tensors)
    assert (store.state, store.is_open, store.checksums()) == ("ready", False, before)


def test_a_dense_weight_that_is_not_finite_is_refused_by_name(
    start: Start, store: WeightStore, paths: tuple[Path, Path]
) -> None:
    before, name = store.checksums(), "model.norm.weight"
    damage(paths[1], lambda tensors: tensors[name][2:3].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=rf"(?s){name} holds NaN.*the old weights are served"):
        reload(store, paths[1])
    assert (store.state, store.checksums()) == ("ready", before)
    with pytest.raises(CheckpointError, match=f"{name} holds NaN"):
        start(paths[1])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", FILE])
def test_a_pipe_in_place_of_a_file_holds_nobody_up(
    store: WeightStore, paths: tuple[Path, Path], name: str
) -> None:
    (paths[1] / name).unlink(missing_ok=True)
    os.mkfifo(paths[1] / name)
    with pytest.raises(CheckpointError):
        store.plan(str(paths[1]), atomic=None)


def test_a_call_that_is_repeated_after_the_end_is_known(
    store: WeightStore, paths: tuple[Path, Path]
) -> None:
    tensors = read(paths[1])
    last = {name: tensors[name].clone() for name in ("model.norm.weight", "lm_head.weight")}
    assert not store.holds(last)
    add(store, tensors)
    assert not store.holds(last), "it has not ended"
    store.finish()
    assert store.holds(last)
    assert not store.holds({})
    assert not store.holds({**last, "another": last["lm_head.weight"]})
    assert not store.holds({name: value + 1 for name, value in last.items()})
    reload(store, paths[0])
    assert not store.holds(last), "other weights have come since"


def test_released_weights_can_be_neither_read_nor_written(
    executor: Executor, paths: tuple[Path, Path]
) -> None:
    store = executor.weights
    executor.release([Region.WEIGHTS])
    assert executor.state == store.state == WeightsState.RELEASED
    update = store.plan(str(paths[1]), atomic=None)  # headers only
    for act in (store.checksums, store.begin, store.scramble, lambda: store.commit(update)):
        with pytest.raises(ConfigError, match="the weights are released"):
            act()
    with pytest.raises(ConfigError, match="the weights are released"):
        add(store, {"model.norm.weight": torch.ones(64)})
    with pytest.raises(ConfigError, match="the weights are released"):
        store.value("model.norm.weight")


def test_resumed_weights_that_nobody_kept_need_a_full_update(
    start: Start, executor: Executor, paths: tuple[Path, Path]
) -> None:
    store, places = executor.weights, addresses(executor)
    told = start(paths[1]).weights.checksums()
    executor.release([Region.WEIGHTS])
    executor.resume([Region.WEIGHTS])
    assert executor.state == store.state == WeightsState.NOT_LOADED
    add(store, {"model.norm.weight": torch.ones(64)})
    assert "lm_head.weight" in store.unfinished()
    with pytest.raises(CheckpointError, match="not sent"):
        store.finish()
    assert store.state is WeightsState.NOT_LOADED
    add(store, read(paths[1]))
    store.finish()
    assert (executor.state, store.checksums()) == (READY, told)
    assert addresses(executor) == places


def test_a_failed_update_of_undefined_weights_leaves_them_undefined(
    executor: Executor, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = executor.weights, executor.weights.checksums()
    executor.release([Region.WEIGHTS])
    executor.resume([Region.WEIGHTS])
    update = store.plan(str(paths[1]), atomic=True)  # there is nothing worth restoring
    assert not update.atomic
    with monkeypatch.context() as patch:
        shrink(paths[1], patch)
        with pytest.raises(CheckpointError, match="a full update must follow"):
            store.commit(update)
    assert store.state is WeightsState.NOT_LOADED
    reload(store, paths[0])
    assert (store.state, store.checksums()) == (WeightsState.READY, before)


def test_weights_that_were_kept_are_back_after_resume_alone(
    executor: Executor, paths: tuple[Path, Path], serve: Serve
) -> None:
    before = executor.weights.checksums()
    says = serve(executor, PROMPTS, num_new=8, chunk_tokens=8)
    change = executor.release(list(Region), backup=True)
    assert change.num_bytes[Region.WEIGHTS] == executor.weights.num_bytes
    assert executor.state == WeightsState.RELEASED
    executor.resume([Region.WEIGHTS])
    assert executor.state == KV_RELEASED
    assert executor.resume([Region.WEIGHTS]).already == (Region.WEIGHTS,)
    executor.resume(list(Region))
    assert executor.state == READY
    assert executor.weights.checksums() == before
    assert serve(executor, PROMPTS, num_new=8, chunk_tokens=8) == says


def test_a_released_kv_cache_alone_stops_steps_and_loses_no_weights(executor: Executor) -> None:
    before = executor.weights.checksums()
    executor.release([Region.KV_CACHE])
    assert (executor.state, executor.weights.state) == (KV_RELEASED, WeightsState.READY)
    executor.release([Region.GRAPHS])
    executor.resume([Region.KV_CACHE])
    assert executor.state == READY, "a step needs no graph"
    assert executor.weights.checksums() == before


def test_noise_is_inconsistent_until_a_full_update(
    store: WeightStore, paths: tuple[Path, Path]
) -> None:
    before = store.checksums()
    store.scramble()
    assert store.state is WeightsState.INCONSISTENT
    noise = store.checksums()
    same = [name for name in before if noise[name] == before[name]]
    assert all(name.endswith("input_scale") for name in same), "dynamic: no slot holds them"
    reload(store, paths[0])
    assert (store.state, store.checksums()) == (WeightsState.READY, before)


def test_values_are_read_by_their_checkpoint_name(
    store: WeightStore, paths: tuple[Path, Path]
) -> None:
    tensors = read(paths[0])
    assert torch.equal(store.value("model.norm.weight"), tensors["model.norm.weight"])
    name = f"{EXPERT}.up_proj.weight"
    assert (store.value(name) - tensors[name]).abs().max() < tensors[name].abs().max() / 8
    with pytest.raises(RequestError, match="no weight 'nobody'"):
        store.value("nobody")


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of a checkpoint whose experts are in another form."""
    file = Path(__file__).parents[2] / "tools" / "quantize_checkpoint.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def write_form(path: Path, form: str) -> Path:
        out = tmp_path_factory.mktemp("stored") / form
        tool.quantize_checkpoint(path, out, form, which=tool.EXPERTS)
        return out

    return write_form
