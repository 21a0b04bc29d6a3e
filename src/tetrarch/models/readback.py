# SPDX-License-Identifier: Apache-2.0
"""What a model holds, in the form in which checkpoints have it: values by name, and checksums.

A runner's layout, its folded scales and its caches are its own affair. The form in which weights
are loaded is everybody's, so that two servers, or a server and a file, can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields

import torch
from torch import Tensor

from tetrarch.core.errors import CheckpointError, RequestError
from tetrarch.memory.checksum import digest
from tetrarch.models.build import Model
from tetrarch.models.destinations import DenseDestination, ExpertDestination
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.stores import buffer_of
from tetrarch.moe.types import CanonicalExperts, Part, PlainExperts
from tetrarch.numerics import nvfp4

__all__ = ["checksums", "digests_of", "read_back", "verify"]

_SHOWN = 10  # names in a message


def checksums(model: Model, only: Collection[str] | None = None) -> dict[str, str]:
    """Return the digest of every loaded tensor.

    Args:
        model: Loaded.
        only: Names, as they are returned: what they do not touch is not read. An expert layer is
            read whole. `None`: everything.

    Returns:
        Dense weights under their Hugging Face names; the experts of a layer as
        `{path of the layer}.{field of CanonicalExperts or PlainExperts}`.
    """
    layers = None if only is None else {name.rpartition(".")[0] for name in only}
    found = {
        name: digest(tensor)
        for name, tensor in model.weights.items()
        if only is None or name in only
    }
    for path, layer in model.experts.items():
        if layers is None or path in layers:
            found |= digests_of(path, layer.canonical())
    return found


def digests_of(path: str, experts: CanonicalExperts | PlainExperts) -> dict[str, str]:
    """Return one layer's part of `checksums`."""
    return {f"{path}.{name}": digest(tensor) for name, tensor in _tensors(experts)}


def verify(model: Model, written: Mapping[str, str]) -> None:
    """Check that the slots hold what was written to them.

    Slots may share memory, and a later write then spoils an earlier one; nobody else would tell.

    Args:
        model: After an update.
        written: Digests of what was written, named as by `checksums`.

    Raises:
        CheckpointError: It names the tensors that differ.
    """
    resident = checksums(model, only=written.keys())
    wrong = [name for name, told in written.items() if resident[name] != told]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not hold what was written to them",
            why=", ".join(wrong[:_SHOWN]),
            fix="this is a defect, of the memory or of tetrarch: report it",
        )


def read_back(model: Model, name: str) -> Tensor:
    """Return a resident weight under its checkpoint name; NVFP4 experts decoded.

    Args:
        model: Loaded.
        name: As in a checkpoint: `model.layers.0.mlp.experts.3.down_proj.weight`.

    Returns:
        The values, in the model's dtype.

    Raises:
        RequestError: The model has no such weight, or it belongs to another rank.
    """
    try:
        to = model.names.resolve(name)
    except CheckpointError as error:
        raise _unknown(name) from error
    if isinstance(to, DenseDestination) and to.name in model.weights:
        return model.weights[to.name]
    if isinstance(to, ExpertDestination):
        return _expert(model.experts[to.layer], to, name)
    raise _unknown(name)


def _tensors(experts: CanonicalExperts | PlainExperts) -> Iterator[tuple[str, Tensor]]:
    for field in fields(experts):
        tensor = getattr(experts, field.name)
        if tensor is not None:
            yield field.name, tensor


def _expert(layer: MoELayer, to: ExpertDestination, name: str) -> Tensor:
    """Put together what a checkpoint has in one tensor: one matrix, gate with up, or a stack."""
    spec = layer.spec
    first, count = spec.first_local_expert, spec.num_local_experts
    wanted = range(spec.num_experts) if to.expert is None else (to.expert,)
    if any(not 0 <= expert - first < count for expert in wanted):
        raise RequestError(
            f"{name!r} belongs to another rank",
            why=f"this one holds experts {first} to {first + count - 1}",
            fix="ask for an expert of this rank",
            param="name",
        )
    experts = layer.canonical()
    ones = [_joined(experts, to, layer=layer, local=expert - first) for expert in wanted]
    return torch.stack(ones) if to.expert is None else ones[0]


def _joined(
    experts: CanonicalExperts | PlainExperts, to: ExpertDestination, *, layer: MoELayer, local: int
) -> Tensor:
    parts = (Part.GATE, Part.UP) if to.part is None else (to.part,)
    values = [_part(experts, part, layer=layer, local=local, bias=to.bias) for part in parts]
    rows = torch.stack(values, 1).flatten(0, 1) if to.interleaved else torch.cat(values)
    return rows.mT if to.transposed and not to.bias else rows


def _part(
    experts: CanonicalExperts | PlainExperts,
    part: Part,
    *,
    layer: MoELayer,
    local: int,
    bias: bool,
) -> Tensor:
    """Return one matrix (N, K), or one bias (N,)."""
    spec, rows = layer.spec, layer.spec.rows_of(part)
    tensors = dict(_tensors(experts))
    name = buffer_of(part)
    if bias:
        return tensors[f"{name}_bias"][local, rows]
    if isinstance(experts, PlainExperts):
        return tensors[name][local, rows]
    scales = tensors[f"{name}_global_scale"][local].view(-1)
    return nvfp4.decode(
        tensors[name][local, rows],
        tensors[f"{name}_block_scale"][local, rows],
        global_scale=scales[1 if rows.start else 0],
        dtype=spec.dtype,
    )


def _unknown(name: str) -> RequestError:
    return RequestError(
        f"there is no weight {name!r}",
        why="no parameter, buffer or expert of the served model carries that name",
        fix="use a name of the checkpoint's safetensors index",
        param="name",
    )
