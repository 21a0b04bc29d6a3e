# SPDX-License-Identifier: Apache-2.0
"""Where one layer's matrices are put while it is collected."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tetrarch.moe.registry import ENCODERS
from tetrarch.moe.types import CanonicalExperts, ExpertSpec, Nvfp4Matrix, Part, PlainExperts
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Recipe

__all__ = ["PackedStore", "PlainStore", "buffer_of"]

_LONGEST_RUN = {"cpu": 1}  # experts that are encoded together; one is no slower on a CPU
_LONGEST_ELSEWHERE = 4  # where starting a kernel costs more than an expert


def buffer_of(part: Part) -> str:
    """Return the name of the matrix that a part is stored in."""
    return "down" if part is Part.DOWN else "gate_up"


class PackedStore:
    """The buffers of `CanonicalExperts`."""

    def __init__(self, spec: ExpertSpec, recipe: Recipe) -> None:
        """Allocate one layer; `recipe` is the 4-over-6 of matrices quantized here."""
        self._spec, self._recipe = spec, recipe
        experts, device = spec.num_local_experts, spec.device
        self._buffers: dict[str, Tensor] = {}
        for name, (rows, width) in spec.matrices.items():
            codes = torch.empty(experts, rows, width // 2, dtype=torch.uint8, device=device)
            shape = (experts, rows, width // 16)
            block_scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            self._buffers |= {name: codes, f"{name}_block_scale": block_scale}
        columns = len(spec.parts) - 1  # gate and up, or up alone
        for name, shape in (("gate_up", (experts, columns)), ("down", (experts,))):
            global_scale = torch.empty(shape, dtype=torch.float32, device=device)
            self._buffers[f"{name}_global_scale"] = global_scale
        self._waiting: dict[int, tuple[Part, Tensor]] = {}  # local expert: its raw gate or up
        self._runs: dict[str, list[tuple[int, list[Tensor]]]] = {}  # neighbours to encode together
        self._longest = _LONGEST_RUN.get(device.type, _LONGEST_ELSEWHERE)
        self._encode_weights = ENCODERS[device.type]

    def put(self, part: Part, local: int, value: Tensor | Nvfp4Matrix) -> None:
        """Take an encoded matrix as it is; encode another one once its scale is known.

        Gate and up share a global scale, so the first of the two waits for the second.
        """
        if isinstance(value, Nvfp4Matrix):
            self._write(part, local, value)
            return
        value = value.to(self._spec.device)
        if part is Part.DOWN or not self._spec.activation.gated:
            self._encode(buffer_of(part), local, [value])
        elif local not in self._waiting:
            self._waiting[local] = (part, value)
        else:
            _, other = self._waiting.pop(local)
            gate, up = (value, other) if part is Part.GATE else (other, value)
            self._encode("gate_up", local, [gate, up])

    def _encode(self, name: str, local: int, matrices: list[Tensor]) -> None:
        """Encode one expert's, with those of the experts before it where they still wait."""
        run = self._runs.setdefault(name, [])
        if run and local != run[-1][0] + 1:
            self._flush(name)
        run.append((local, matrices))
        if len(run) >= self._longest:
            self._flush(name)

    def _flush(self, name: str) -> None:
        run = self._runs[name]
        raw = torch.cat([matrix for _, matrices in run for matrix in matrices])
        some = slice(run[0][0], run[-1][0] + 1)
        scales = raw.new_empty(2, len(run), dtype=torch.float32)
        self._encode_weights(
            raw.view(len(run), *self._spec.matrices[name]),
            codes=self._buffers[name][some],
            block_scale=self._buffers[f"{name}_block_scale"][some],
            global_scale=scales[0],
            amax=scales[1],
            recipe=self._recipe,
        )
        self._buffers[f"{name}_global_scale"][some].view(len(run), -1).copy_(scales[0, :, None])
        run.clear()

    def _write(self, part: Part, local: int, value: Nvfp4Matrix) -> None:
        name, rows = buffer_of(part), self._spec.rows_of(part)
        self._buffers[name][local, rows] = value.codes
        self._buffers[f"{name}_block_scale"][local, rows] = value.block_scale
        columns = self._buffers[f"{name}_global_scale"][local].view(-1)
        columns[1 if rows.start else 0].fill_(float(value.global_scale))

    def finish(
        self, *, input_scales: Mapping[str, Tensor], biases: Mapping[str, Tensor]
    ) -> CanonicalExperts:
        """Hand the buffers over."""
        for name in [name for name, run in self._runs.items() if run]:
            self._flush(name)
        return CanonicalExperts(**self._buffers, **input_scales, **biases)


class PlainStore:
    """The buffers of `PlainExperts`."""

    def __init__(self, spec: ExpertSpec) -> None:
        """Allocate one layer."""
        self._spec = spec
        self._buffers = {
            name: torch.empty(spec.num_local_experts, *shape, dtype=spec.dtype, device=spec.device)
            for name, shape in spec.matrices.items()
        }

    def put(self, part: Part, local: int, value: Tensor | Nvfp4Matrix) -> None:
        """Take a matrix in the model's dtype; an encoded one is decoded in FP32 first."""
        if isinstance(value, Nvfp4Matrix):
            scale = value.global_scale.reshape(())
            value = nvfp4.decode(value.codes, value.block_scale, global_scale=scale)
        rows = self._spec.rows_of(part)
        self._buffers[buffer_of(part)][local, rows] = value.to(self._spec.dtype)

    def finish(self, *, biases: Mapping[str, Tensor]) -> PlainExperts:
        """Hand the buffers over."""
        return PlainExperts(**self._buffers, **biases)
