# SPDX-License-Identifier: Apache-2.0
"""A quantization contract: which numbers stand for the weights and for the activations.

A contract says nothing about kernels, layouts or ranks. Two models that share a contract (a
target and its embedded draft, say) agree bit for bit on what a weight means. What travels
between ranks and what is refused follow the *activations*, not the quantization's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "CONTRACTS",
    "WEIGHT_RECIPE",
    "Activations",
    "QuantContract",
    "Quantization",
    "Recipe",
    "Scale",
    "Scope",
    "SourceFormat",
    "activations_of",
    "contract_for",
]


class Quantization(StrEnum):
    """What `--quantization` says: where NVFP4 weights come from."""

    NVFP4_ONLINE = "nvfp4_online"  # quantized by us while loading
    MODELOPT_FP4 = "modelopt_fp4"  # serialized NVFP4; other sources are quantized while loading
    NONE = "none"  # experts stay in the checkpoint's precision


class Activations(StrEnum):
    """What `--moe-activations` says: what the experts' inputs are rounded to."""

    PER_TOKEN = "per_token"  # NVFP4, one dynamic FP32 scale per row
    PER_TENSOR = "per_tensor"  # NVFP4, one static FP32 scale per tensor
    BF16 = "bf16"  # not rounded: W4A16, or plain BF16 experts


class SourceFormat(StrEnum):
    """What a checkpoint's expert weights are stored as."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_BLOCK = "fp8_block"  # DeepSeek: weight_scale_inv per 128x128
    FP8_TENSOR = "fp8_tensor"  # ModelOpt FP8: weight_scale per tensor
    NVFP4_MODELOPT = "nvfp4_modelopt"
    NVFP4_COMPRESSED = "nvfp4_compressed"  # compressed-tensors nvfp4-pack-quantized


class Scope(StrEnum):
    """How many elements share one scale."""

    BLOCK = "block"  # 16 neighbours along the reduction axis
    TOKEN = "token"  # one row of activations
    EXPERT = "expert"  # one expert's matrix
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Scale:
    """One level of scaling. Scales decode: `value = code * scale`."""

    scope: Scope
    dtype: str  # "e4m3" | "fp32"
    dynamic: bool  # computed from the data at run time, or fixed at load time


@dataclass(frozen=True, slots=True)
class Recipe:
    """How 4-over-6 picks between a block's two candidate scales (numerics.md, section 6).

    Attributes:
        e4m3_max: 448 or 256; enters the global scale and the strict error's denominator.
        error: `mae` or `mse`.
        half_error: Measure the error on FP16 products without the division ("fast-math error").
    """

    e4m3_max: int = 448
    error: str = "mae"
    half_error: bool = False

    @property
    def token_factor(self) -> float:
        """Per-token factor that lets a block scale reach `e4m3_max`: 1 / (6 * e4m3_max)."""
        return 1 / (6 * self.e4m3_max)


@dataclass(frozen=True, slots=True)
class QuantContract:
    """What an expert's numbers mean, for weights and for activations.

    Attributes:
        quantization: Where the weights come from.
        activations: What expert inputs are rounded to.
        weight_scales: Inner level first, `w = e2m1 * block * expert`; empty: not quantized.
        activation_scales: Inner level first; empty: not quantized.
        sources: Checkpoint formats this contract can start from.
        covers_draft: The contract binds embedded draft experts too, and overrides the
            checkpoint's own ignore list for MoE layers.
    """

    quantization: Quantization
    activations: Activations
    weight_scales: tuple[Scale, ...]
    activation_scales: tuple[Scale, ...]
    sources: frozenset[SourceFormat]
    covers_draft: bool

    @property
    def name(self) -> str:
        """`nvfp4_online/per_token` and the like."""
        return f"{self.quantization}/{self.activations}"

    @property
    def quantizes_weights(self) -> bool:
        """Whether expert weights are NVFP4."""
        return bool(self.weight_scales)

    @property
    def quantizes_activations(self) -> bool:
        """Whether expert inputs are NVFP4."""
        return bool(self.activation_scales)


# Online weights always choose between 4 and 6, whatever the activations do.
WEIGHT_RECIPE = Recipe(448, "mse", half_error=True)

_BLOCK = Scale(Scope.BLOCK, "e4m3", dynamic=False)
_BLOCK_DYNAMIC = Scale(Scope.BLOCK, "e4m3", dynamic=True)
_W4 = (_BLOCK, Scale(Scope.EXPERT, "fp32", dynamic=False))
_A4_TOKEN = (_BLOCK_DYNAMIC, Scale(Scope.TOKEN, "fp32", dynamic=True))
_A4_TENSOR = (_BLOCK_DYNAMIC, Scale(Scope.TENSOR, "fp32", dynamic=False))

_NVFP4 = frozenset({SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED})
_PLAIN = frozenset({SourceFormat.BF16, SourceFormat.FP16, SourceFormat.FP32})
_WIDE = _PLAIN | {SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR}

_Q, _A = Quantization, Activations

# The first row of a quantization is its default.
CONTRACTS: tuple[QuantContract, ...] = (
    QuantContract(_Q.NVFP4_ONLINE, _A.PER_TOKEN, _W4, _A4_TOKEN, _WIDE, covers_draft=True),
    QuantContract(_Q.NVFP4_ONLINE, _A.BF16, _W4, (), _WIDE, covers_draft=True),
    QuantContract(
        _Q.MODELOPT_FP4, _A.PER_TENSOR, _W4, _A4_TENSOR, _NVFP4 | _WIDE, covers_draft=False
    ),
    QuantContract(_Q.MODELOPT_FP4, _A.PER_TOKEN, _W4, _A4_TOKEN, _NVFP4, covers_draft=False),
    QuantContract(_Q.MODELOPT_FP4, _A.BF16, _W4, (), _NVFP4 | _WIDE, covers_draft=False),
    QuantContract(_Q.NONE, _A.BF16, (), (), _WIDE, covers_draft=False),
)


def contract_for(
    quantization: Quantization, activations: Activations | None = None
) -> QuantContract | None:
    """Return the row for a pair, or the quantization's default; `None` if there is none."""
    for contract in CONTRACTS:
        if contract.quantization == quantization and activations in (None, contract.activations):
            return contract
    return None


def activations_of(quantization: Quantization) -> tuple[Activations, ...]:
    """Return what a quantization may be paired with, its default first."""
    return tuple(row.activations for row in CONTRACTS if row.quantization == quantization)
