# SPDX-License-Identifier: Apache-2.0
"""An update in pieces ends with the bytes of a fresh load, or says what it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.readback import checksums
from tetrarch.models.report import Unused
from tetrarch.models.update import LiveUpdate
from tetrarch.numerics.contract import Activations, Quantization, SourceFormat

ONLINE: dict[str, Any] = {"quantization": Quantization.NVFP4_ONLINE, "source": SourceFormat.FP32}
STATIC: dict[str, Any] = {
    "quantization": Quantization.MODELOPT_FP4,
    "activations": Activations.PER_TENSOR,
    "source": SourceFormat.NVFP4_MODELOPT,
}


def perturbed(path: Path, folder: Path) -> Path:
    """A copy of a checkpoint in which every floating-point weight is another."""
    folder.mkdir()
    for file in path.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    plain = (torch.float32, torch.bfloat16)
    changed = {
        name: (tensor * 1.03 if tensor.dtype in plain else tensor.flip(0)).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pieces_of(tensors: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Shuffle tensors and cut them into calls: parts of one weight fall into different ones."""
    names = list(tensors)
    order = torch.randperm(len(names), generator=torch.manual_seed(1)).tolist()
    shuffled = iter([names[index] for index in order])
    return [
        {name: tensors[name] for name in batch}
        for batch in iter(lambda: list(itertools.islice(shuffled, size)), [])
    ]


def begin(model: Model, plan: Any, *, keeps: bool = True) -> tuple[LiveUpdate, Journal]:
    journal = Journal(keeps=keeps)
    return LiveUpdate(model, plan.quant, journal), journal


def send(update: LiveUpdate, tensors: Mapping[str, Tensor]) -> None:
    pieces = update.check(tensors)
    update.stage(pieces)
    update.commit(pieces)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("family", "form", "contract"),
    [
        ("qwen3_moe", None, ONLINE),
        ("gpt_oss", None, {}),
        ("gpt_oss", None, ONLINE),  # its matrices arrive transposed
        ("qwen3_moe", "fp8_block", ONLINE),
        ("qwen3_moe", "nvfp4_modelopt", STATIC),
    ],
)
def test_pieces_in_any_order_and_size_give_the_bytes_of_a_fresh_load(
    lab: Any, tmp_path: Path, family: str, form: str | None, contract: dict[str, Any], size: int
) -> None:
    path = lab.tiny(family)
    if form is not None:
        which = lab.experts if "nvfp4" in form else None
        path, _ = lab.store(path, form, which)
    other = perturbed(path, tmp_path / "other")
    fresh = checksums(lab.load(other, **contract)[0])
    model, _ = lab.load(path, **contract)
    before, addresses = checksums(model), model.weights.addresses()
    assert before != fresh
    update, journal = begin(model, lab.plan(path, **contract))
    for piece in pieces_of(load_file(other / "model.safetensors"), size):
        send(update, piece)
    update.check_finished(full=True)
    assert checksums(model) == fresh
    journal.undo()
    assert checksums(model) == before
    assert model.weights.addresses() == addresses


@pytest.fixture
def target(lab: Any) -> tuple[Model, Any, dict[str, Tensor]]:
    path = lab.tiny("qwen3_moe")
    model, _ = lab.load(path, **ONLINE)
    tensors = {n: t * 1.5 for n, t in load_file(path / "model.safetensors").items()}
    return model, lab.plan(path, **ONLINE), tensors


def experts_of(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if f"layers.{layer}.mlp.experts." in n}


def test_a_gate_and_its_up_in_different_calls_wait_for_each_other(target: Any) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    before = checksums(model)
    layer = experts_of(tensors, 0)
    gates = {name: tensor for name, tensor in layer.items() if "gate_proj" in name}
    send(update, gates)
    assert checksums(model) == before
    assert "model.layers.0.mlp.experts: up of expert 0" in update.unfinished()
    with pytest.raises(CheckpointError, match="half-complete"):
        update.check_finished(full=False)
    send(update, {name: tensor for name, tensor in layer.items() if name not in gates})
    assert update.unfinished() == []
    update.check_finished(full=False)
    changed = {name for name, told in checksums(model).items() if before[name] != told}
    assert changed
    assert all(name.startswith("model.layers.0.mlp.experts.") for name in changed)


def test_the_same_call_again_changes_nothing(target: Any) -> None:
    """A client that timed out repeats its call, before or after the layer was whole."""
    model, plan, tensors = target
    update, _ = begin(model, plan)
    for piece in pieces_of(tensors, 9):
        send(update, piece)
        send(update, {name: tensor.clone() for name, tensor in piece.items()})
    update.check_finished(full=True)
    assert update.num_tensors == len(tensors)
    assert update.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_other_values_for_an_expert_of_the_same_update_are_refused(target: Any) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    send(update, {name: tensors[name]})
    with pytest.raises(CheckpointError, match="came twice, with different values"):
        update.check({name: tensors[name] * 2})
    dense = "model.norm.weight"
    for factor in (1.0, 2.0):  # a dense weight is simply written again
        send(update, {dense: tensors[dense] * factor})
    assert torch.equal(model.weights[dense], tensors[dense] * 2)


@pytest.mark.parametrize(
    ("name", "tensor", "word"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj.weight", torch.ones(3, 3), "shape"),
        ("model.norm.weight", torch.ones(2), "shape"),
        ("model.layers.7.mlp.experts.0.gate_proj.weight", torch.ones(3, 3), "unexpected"),
        ("model.layers.0.mlp.experts.99.gate_proj.weight", torch.ones(3, 3), "unexpected"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int32), r"of a wrong type(.|\n)*int32"),
        ("model.norm.weight", torch.ones(64, dtype=torch.float64), "BF16, FP16 or FP32"),
        ("nonsense", torch.ones(2), "unexpected"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_whole_and_the_update_goes_on(
    target: Any, name: str, tensor: Tensor, word: str
) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    before = checksums(model)
    with pytest.raises(CheckpointError, match=word):
        update.check({**tensors, name: tensor})
    assert checksums(model) == before
    send(update, tensors)
    update.check_finished(full=True)


def test_values_that_cannot_be_weights_are_found_before_anything_is_written(
    lab: Any, tmp_path: Path
) -> None:
    path, _ = lab.store(lab.tiny("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    model, _ = lab.load(path, **STATIC)
    before = checksums(model)
    tensors = load_file(perturbed(path, tmp_path / "bad") / "model.safetensors")
    last = [name for name in tensors if name.endswith("down_proj.weight_scale_2")][-1]
    tensors[last] = torch.full_like(tensors[last], float("nan"))
    update, journal = begin(model, lab.plan(path, **STATIC))
    with pytest.raises(CheckpointError, match="not a positive finite number"):
        send(update, tensors)
    assert journal.is_empty
    assert checksums(model) == before


def test_a_full_update_names_what_has_not_come(target: Any) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    send(
        update, {n: t for n, t in tensors.items() if "1.mlp" not in n and n != "model.norm.weight"}
    )
    update.check_finished(full=False)
    with pytest.raises(CheckpointError, match="not sent") as refused:
        update.check_finished(full=True)
    assert "model.norm.weight" in refused.value.why


def test_an_empty_call_is_no_error(target: Any) -> None:
    model, plan, _ = target
    update, journal = begin(model, plan)
    send(update, {})
    update.check_finished(full=False)
    assert journal.is_empty


def test_what_a_later_write_spoils_is_found(target: Any) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    name = "model.norm.weight"
    send(update, {name: tensors[name]})
    model.weights[name][0] += 1.0
    with pytest.raises(CheckpointError, match="do not hold what was written") as refused:
        update.check_finished(full=False)
    assert name in refused.value.why


def test_a_late_input_scale_that_nobody_wants_is_dropped(lab: Any) -> None:
    path, _ = lab.store(lab.tiny("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    contract = STATIC | {"activations": Activations.BF16}
    model, _ = lab.load(path, **contract)
    update, _ = begin(model, lab.plan(path, **contract))
    tensors = load_file(path / "model.safetensors")
    late = {name: tensor for name, tensor in tensors.items() if name.endswith(".input_scale")}
    assert late
    send(update, {name: tensor for name, tensor in tensors.items() if name not in late})
    for _ in range(2):
        assert update.check(late).num_used == 0
        send(update, late)
    update.check_finished(full=True)
    assert update.num_tensors == len(tensors) - len(late)
    assert {kind: sorted(names) for kind, names in update.unused.items()} == {
        Unused.NVFP4_INPUT_SCALE: sorted(late)
    }


def test_what_waited_and_is_left_out_in_the_end_is_counted_no_more(lab: Any) -> None:
    path, _ = lab.store(lab.tiny("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    contract = STATIC | {"activations": Activations.BF16}
    model, _ = lab.load(path, **contract)
    update, _ = begin(model, lab.plan(path, **contract))
    tensors = load_file(path / "model.safetensors")
    early = {name: tensor for name, tensor in tensors.items() if name.endswith(".input_scale")}
    send(update, early)
    assert (update.num_tensors, update.unused) == (len(early), {}), "it waits for its weight"
    send(update, {name: tensor for name, tensor in tensors.items() if name not in early})
    update.check_finished(full=True)
    others = [tensor for name, tensor in tensors.items() if name not in early]
    assert update.num_tensors == len(others)
    assert update.num_bytes == sum(tensor.nbytes for tensor in others)
    assert sum(map(len, update.unused.values())) == len(early)


def test_what_is_not_selected_is_told_until_a_later_call_brings_it(target: Any) -> None:
    model, plan, tensors = target
    update, _ = begin(model, plan)
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    pieces = update.check({}, unselected=norm)
    update.stage(pieces)
    update.commit(pieces)
    assert (update.num_tensors, update.unused) == (0, {Unused.SELECTOR: tuple(norm)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight \(selector\)"):
        update.check_finished(full=False)
    send(update, norm)
    assert (update.num_tensors, update.unused) == (1, {})
    update.check_finished(full=False)


def test_an_update_all_of_which_is_left_out_is_refused_by_name(target: Any) -> None:
    """As a folder without a single tensor of the model would be."""
    model, plan, tensors = target
    update, journal = begin(model, plan)
    send(update, {"mtp.fc.weight": torch.ones(3)})
    send(update, {"mtp.layers.1.norm.weight": torch.ones(3), "x.k_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match="3 left out, and nothing else was sent") as refused:
        update.check_finished(full=False)
    for name in ("mtp.fc.weight (mtp)", "mtp.layers.1.norm.weight (mtp)", "x.k_scale (kv_scale)"):
        assert name in refused.value.why
    assert journal.is_empty
    send(update, {"model.norm.weight": tensors["model.norm.weight"]})
    update.check_finished(full=False)
