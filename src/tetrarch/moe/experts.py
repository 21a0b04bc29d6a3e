# SPDX-License-Identifier: Apache-2.0
"""One layer's experts, collected matrix by matrix and quantized as they come.

By contract and source, a BF16/FP16/FP32 matrix is quantized as soon as its global scale is known
(gate and up share one, so the first of the two waits for the other), a serialized NVFP4 matrix is
taken as it is, and where the layer runs unquantized either becomes the model's dtype. No more is
held than the finished layer and one expert's raw matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.core.errors import CheckpointError
from tetrarch.moe.matrices import Values, bias_flaw, matrix_flaw, scale_flaw
from tetrarch.moe.stores import PackedStore, PlainStore, buffer_of
from tetrarch.moe.types import CanonicalExperts, ExpertSpec, Nvfp4Matrix, Part, PlainExperts
from tetrarch.numerics.contract import Activations, SourceFormat

__all__ = ["ExpertStager"]


class ExpertStager:
    """Collect a layer's matrices in any order; `finish` returns them under the contract.

    Nothing is allocated before the first matrix.

    Attributes:
        packs: Whether the result is NVFP4.
    """

    def __init__(
        self, spec: ExpertSpec, quant: QuantPlan, *, ignored: bool = False, layer: str = ""
    ) -> None:
        """Begin a layer.

        Args:
            spec: The layer's geometry on this rank.
            quant: The contract, with the recipe of weights quantized here.
            ignored: The layer runs unquantized (`--fp4-ignored-layers`).
            layer: What errors call it.
        """
        self._spec, self._quant, self._layer = spec, quant, layer or "expert layer"
        self.packs = quant.contract.quantizes_weights and not ignored
        self._static = self.packs and quant.contract.activations is Activations.PER_TENSOR
        self._store: PackedStore | PlainStore | None = None
        self._biases: dict[str, Tensor] = {}
        self._seen: set[tuple[Part, int]] = set()
        self._seen_bias: set[tuple[Part, int]] = set()
        self._kinds: set[str] = set()
        self._input_scales: dict[tuple[Part, int], float | None] = {}
        self._num_parts = self._num_biases = 0  # that `is_complete` waits for
        self._values = Values()

    def put(self, part: Part, expert: int, value: Tensor | Nvfp4Matrix) -> None:
        """Take one matrix.

        Args:
            part: Which matrix of the expert.
            expert: Global id; the experts of other ranks are dropped.
            value: (I, H) for gate and up, (H, I) for down, or the same serialized.

        Raises:
            CheckpointError: The matrix came twice, does not fit, or is of a kind that the contract
                does not take. What it holds is for `check`.
        """
        self._expect(part, expert, self._seen)
        self._check_kind(part, expert, value)
        self._refuse(part, expert, matrix_flaw(value, self._spec.shape_of(part)))
        if isinstance(value, Nvfp4Matrix) and self._static:
            self._note_input_scale(part, expert, value.input_scale)
        local = self._local(expert)
        self._num_parts += self._static or local is not None
        if local is None:
            return
        self._values.note(f"{part} of expert {expert}", value)
        self._open().put(part, local, value)

    def put_bias(self, part: Part, expert: int, value: Tensor) -> None:
        """Take one bias: (I,) for gate and up, (H,) for down.

        Raises:
            CheckpointError: It came twice, does not fit, or these experts have no bias.
        """
        self._expect(part, expert, self._seen_bias)
        unexpected = None if self._spec.has_bias else "these experts have no bias"
        self._refuse(part, expert, unexpected or bias_flaw(value, self._spec.shape_of(part)[0]))
        if (local := self._local(expert)) is None:
            return
        self._num_biases += 1
        self._values.note(f"{part} bias of expert {expert}", value)
        spec, name = self._spec, buffer_of(part)
        if name not in self._biases:
            shape = (spec.num_local_experts, spec.matrices[name][0])
            self._biases[name] = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        self._biases[name][local, spec.rows_of(part)] = value.to(spec.dtype)

    @property
    def is_complete(self) -> bool:
        """Whether everything has come that `finish` and its numbers depend on.

        A static input scale is one for all ranks, so then the experts of others count as well.
        """
        spec = self._spec
        parts = (spec.num_experts if self._static else spec.num_local_experts) * len(spec.parts)
        biases = spec.num_local_experts * len(spec.parts) if spec.has_bias else 0
        return self._num_parts >= parts and self._num_biases >= biases

    def check(self) -> None:
        """Look at the values that have come since the last check; waits for the device.

        Raises:
            CheckpointError: Some are NaN, infinite, or scales that cannot be.
        """
        if (found := self._values.flaw()) is not None:
            raise self._flaw(*found)

    def missing(self) -> list[tuple[Part, int]]:
        """Return this rank's matrices that have not come yet, with global ids."""
        return self._missing(self._seen)

    def finish(self) -> CanonicalExperts | PlainExperts:
        """Return the whole layer.

        Raises:
            CheckpointError: Something is missing, and the message names all of it; or as `check`.
        """
        self.check()
        missing = [f"{part} of expert {expert}" for part, expert in self.missing()]
        if self._spec.has_bias:
            bias = self._missing(self._seen_bias)
            missing += [f"{part} bias of expert {expert}" for part, expert in bias]
        self._refuse_incomplete("experts", missing)
        biases = {f"{name}_bias": bias for name, bias in self._biases.items()}
        store = self._open()
        if isinstance(store, PlainStore):
            return store.finish(biases=biases)
        input_scales = {
            "gate_up_input_scale": self._input_scale(Part.GATE, Part.UP),
            "down_input_scale": self._input_scale(Part.DOWN),
        }
        return store.finish(input_scales=input_scales, biases=biases)

    def _note_input_scale(self, part: Part, expert: int, scale: Tensor | None) -> None:
        if scale is not None:
            self._refuse(part, expert, scale_flaw("input", scale))
        self._input_scales[part, expert] = None if scale is None else float(scale)

    def _input_scale(self, *parts: Part) -> Tensor:
        """Return the largest input scale of all experts, other ranks' included; 1 if none came.

        Rows are quantized before they are sorted by expert, so a layer has one scale.
        """
        scales = {key: scale for key, scale in self._input_scales.items() if key[0] in parts}
        known = [scale for scale in scales.values() if scale is not None]
        if known:
            without = [f"{p} of expert {e}" for (p, e), scale in scales.items() if scale is None]
            self._refuse_incomplete("input scales", without)
        return torch.tensor(max(known, default=1.0), dtype=torch.float32, device=self._spec.device)

    def _open(self) -> PackedStore | PlainStore:
        if self._store is None:
            spec, recipe = self._spec, self._quant.weight_recipe
            self._store = PackedStore(spec, recipe) if self.packs else PlainStore(spec)
        return self._store

    def _local(self, expert: int) -> int | None:
        local = expert - self._spec.first_local_expert
        return local if 0 <= local < self._spec.num_local_experts else None

    def _missing(self, seen: set[tuple[Part, int]]) -> list[tuple[Part, int]]:
        first = self._spec.first_local_expert
        experts = range(first, first + self._spec.num_local_experts)
        return [(p, e) for e in experts for p in self._spec.parts if (p, e) not in seen]

    def _expect(self, part: Part, expert: int, seen: set[tuple[Part, int]]) -> None:
        """Note that (part, expert) came: once, and only where the model has it."""
        num_experts, parts = self._spec.num_experts, self._spec.parts
        if part not in parts or not 0 <= expert < num_experts:
            self._refuse(part, expert, f"experts 0 to {num_experts - 1} have {', '.join(parts)}")
        self._refuse(part, expert, "it came twice" if (part, expert) in seen else None)
        seen.add((part, expert))

    def _check_kind(self, part: Part, expert: int, value: Tensor | Nvfp4Matrix) -> None:
        serialized, contract = isinstance(value, Nvfp4Matrix), self._quant.contract
        kind = "serialized NVFP4" if serialized else "not quantized"
        need = SourceFormat.NVFP4_MODELOPT if serialized else SourceFormat.BF16
        if self.packs and need not in contract.sources:
            raise CheckpointError(
                f"{self._layer}: {part} of expert {expert} is {kind}",
                why=f"{contract.name} does not take that",
                fix=f"--quantization {'modelopt_fp4' if serialized else 'nvfp4_online'}",
            )
        self._kinds.add(kind)
        mixed = len(self._kinds) > 1
        self._refuse(part, expert, f"it is {kind}, others here are not" if mixed else None)

    def _refuse(self, part: Part, expert: int, why: str | None) -> None:
        """Raise if there is a reason to."""
        if why is not None:
            raise self._flaw(f"{part} of expert {expert}", why)

    def _flaw(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._layer}: {what} cannot be loaded",
            why=why,
            fix="the file is damaged or belongs to another model; compare it with its source",
        )

    def _refuse_incomplete(self, what: str, missing: list[str]) -> None:
        if missing:
            raise CheckpointError(
                f"{self._layer}: its {what} are incomplete",
                why=f"missing: {', '.join(missing)}",
                fix="check that the checkpoint has all its files",
            )
