# SPDX-License-Identifier: Apache-2.0
"""What runs with what: one table, read by the launcher, the command line, the docs and the tests.

A row that is absent is unsupported. A combination that people will try is refused by name in
`REFUSED`, so that the answer says why. Rows are keyed on the *activations*; the quantization
names that may carry them are a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tetrarch.config.hardware import Arch
from tetrarch.core.errors import LaunchErrors, Unsupported
from tetrarch.numerics.contract import Activations, Quantization

__all__ = [
    "REFUSED",
    "SUPPORT",
    "Finalize",
    "Query",
    "Refusal",
    "Route",
    "Wire",
    "arch_names",
    "choose",
    "column_of",
    "dispatch_names",
    "runner_names",
]


class Wire(StrEnum):
    """What the dispatcher sends between ranks."""

    BF16 = "bf16"
    NVFP4 = "nvfp4"


class Finalize(StrEnum):
    """How the top-k partial results become one row."""

    FUSED = "fused"  # atomic adds in the second GEMM: fastest, order not fixed
    SEPARATE = "separate"  # fixed slot order, one rounding: deterministic


@dataclass(frozen=True, slots=True)
class Route:
    """One supported way from router logits to expert output."""

    activations: Activations
    quantizations: tuple[Quantization, ...]
    runner: str
    dispatch: str
    archs: frozenset[Arch]
    wire: Wire = Wire.BF16
    finalize: tuple[Finalize, ...] = (Finalize.SEPARATE,)  # first is the default
    only_compiled: frozenset[Arch] = frozenset()  # of the archs: compiled for them, never run there


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is wanted of the table; `None` leaves a column open."""

    activations: Activations
    quantization: Quantization
    arch: Arch
    runner: str | None = None
    dispatch: str | None = None
    wire: Wire | None = None
    finalize: Finalize | None = None

    def differs_in(self, route: Route) -> list[str]:
        """Return the columns in which `route` is not what is wanted."""
        return [
            column
            for column, fits in (
                ("activations", self.activations == route.activations),
                ("quantization", self.quantization in route.quantizations),
                ("arch", self.arch in route.archs),
                ("runner", self.runner in (None, route.runner)),
                ("dispatch", self.dispatch in (None, route.dispatch)),
                ("wire", self.wire in (None, route.wire)),
                ("finalize", self.finalize is None or self.finalize in route.finalize),
            )
            if not fits
        ]

    def __str__(self) -> str:
        named = [self.runner, self.dispatch]
        if self.wire is Wire.NVFP4:
            named.append("NVFP4 wire")
        if self.finalize is Finalize.FUSED:
            named.append("fused finalize")
        words = [f"{self.quantization}/{self.activations}", *filter(None, named)]
        return f"{' x '.join(words)} on {self.arch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination we know about and decline, and the reason. An open column matches anything."""

    why: str
    fix: str
    activations: tuple[Activations, ...] = tuple(Activations)
    runner: str | None = None
    dispatch: str | None = None
    wire: Wire | None = None
    finalize: Finalize | None = None
    archs: frozenset[Arch] = frozenset(Arch)

    def matches(self, query: Query) -> bool:
        """Whether `query` asks for exactly this."""
        pairs = (
            (self.runner, query.runner),
            (self.dispatch, query.dispatch),
            (self.wire, query.wire),
            (self.finalize, query.finalize),
        )
        fits = query.activations in self.activations and query.arch in self.archs
        return fits and all(mine in (None, asked) for mine, asked in pairs)

    @property
    def subject(self) -> str:
        """What is refused, in words."""
        some = "/".join(self.activations) if len(self.activations) < len(Activations) else ""
        wire = f"{self.wire} wire" if self.wire else None
        finalize = f"{self.finalize} finalize" if self.finalize else None
        what = " x ".join(filter(None, (some, self.runner, self.dispatch, wire, finalize)))
        return what if self.archs == _ANY else f"{what} on {arch_names(self.archs)}"


_ANY = frozenset(Arch)
_CPU = frozenset((Arch.CPU,))
_GPUS = _ANY - _CPU
_Q, _A = Quantization, Activations
_NVFP4 = (_Q.NVFP4_ONLINE, _Q.MODELOPT_FP4)
_ALL = (*_NVFP4, _Q.NONE)

_CONTRACTS = ((_A.PER_TOKEN, _NVFP4), (_A.PER_TENSOR, (_Q.MODELOPT_FP4,)), (_A.BF16, _ALL))
_BOTH = (Finalize.SEPARATE, Finalize.FUSED)
_UNTRIED = _GPUS - {Arch.SM90}

# Order is preference: `auto` takes the first row that fits.
SUPPORT: tuple[Route, ...] = (
    *(
        Route(*carried, "triton", "all_gather", _GPUS, finalize=_BOTH, only_compiled=_UNTRIED)
        for carried in _CONTRACTS
    ),
    *(Route(*carried, "reference", "all_gather", _ANY) for carried in _CONTRACTS),
)

_ALL_GATHER = "--moe-dispatch all_gather"


def arch_names(archs: frozenset[Arch]) -> str:
    """Return them in the order of their age."""
    return ", ".join(arch for arch in Arch if arch in archs)


def _no_runner(name: str, why: str) -> Refusal:
    return Refusal(runner=name, why=why, fix="--moe-runner reference, which runs everywhere")


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        activations=(_A.PER_TOKEN,),
        dispatch="deepep",
        why="the runner computes one FP32 scale per token, so tokens must travel in BF16; DeepEP "
        "low-latency quantizes them before they leave",
        fix=f"{_ALL_GATHER}, or --quantization modelopt_fp4 --moe-activations per_tensor",
    ),
    Refusal(
        activations=(_A.BF16,),
        dispatch="deepep",
        why="BF16 activations are never quantized; DeepEP low-latency quantizes tokens before "
        "they leave",
        fix=_ALL_GATHER,
    ),
    Refusal(
        activations=(_A.PER_TENSOR,),
        dispatch="deepep",
        why="the DeepEP dispatcher is not part of tetrarch yet",
        fix=_ALL_GATHER,
    ),
    Refusal(
        dispatch="all_to_all",
        why="the all-to-all dispatcher is not part of tetrarch yet",
        fix=_ALL_GATHER,
    ),
    *(
        Refusal(
            dispatch=name,
            why="tetrarch sends tokens by all-gather or all-to-all, and has no adapter for this",
            fix=_ALL_GATHER,
        )
        for name in ("deepep_v2", "megamoe", "mooncake", "nixl", "mori", "ascend_fuseep")
    ),
    Refusal(
        activations=(_A.PER_TOKEN, _A.BF16),
        wire=Wire.NVFP4,
        why="these activations never travel quantized: per-token scales are computed by the "
        "runner, and BF16 inputs are not rounded at all",
        fix="--moe-wire bf16",
    ),
    Refusal(
        activations=(_A.PER_TENSOR,),
        wire=Wire.NVFP4,
        why="no dispatcher of tetrarch quantizes tokens before they leave yet",
        fix="--moe-wire bf16",
    ),
    Refusal(
        finalize=Finalize.FUSED,
        archs=_CPU,
        why="the reference runner, the only one on the CPU, has no fused finalize",
        fix="leave --fused-finalize out; results are summed in a fixed order",
    ),
    _no_runner("flashinfer_cutedsl", "FlashInfer's CuTe DSL kernels are not adapted yet"),
    _no_runner("cutedsl", "the CuTe DSL runner is not part of tetrarch yet"),
    Refusal(
        runner="triton",
        archs=_CPU,
        why="Triton compiles its kernels for NVIDIA GPUs alone",
        fix="--moe-runner reference, which runs everywhere",
    ),
    *(
        _no_runner(name, "only FlashInfer's CuTe DSL kernels will be adapted")
        for name in (
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "flashinfer_cutlass",
            "flashinfer_mxfp4",
            "flashinfer_megamoe",
        )
    ),
    *(
        _no_runner(name, "its NVFP4 kernels are another engine's; tetrarch has its own")
        for name in ("marlin", "cutlass", "deep_gemm", "triton_kernel")
    ),
)


def _distinct(names: Iterator[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def runner_names(rows: Iterable[Route | Refusal]) -> tuple[str, ...]:
    """Return every runner that these rows name."""
    return _distinct(row.runner for row in rows)


def dispatch_names(rows: Iterable[Route | Refusal]) -> tuple[str, ...]:
    """Return every dispatcher that these rows name."""
    return _distinct(row.dispatch for row in rows)


def choose(query: Query) -> Route:
    """Return the first row that fits.

    Raises:
        Unsupported: No row fits. The message quotes the refusal if there is one, else it names
            the rows that differ in one column.
        LaunchErrors: Several refusals apply at once.
    """
    for route in SUPPORT:
        if not query.differs_in(route):
            return route
    what = f"{query} is not supported"
    errors = [Unsupported(what, why=no.why, fix=no.fix) for no in REFUSED if no.matches(query)]
    if len(errors) > 1:
        raise LaunchErrors(errors)
    raise errors[0] if errors else _no_such_row(query, what)


def _no_such_row(query: Query, what: str) -> Unsupported:
    near = [
        f"{column} {column_of(route, column)}"
        for route in SUPPORT
        for column in query.differs_in(route)
        if len(query.differs_in(route)) == 1
    ]
    fix = "nearest rows: " + "; ".join(dict.fromkeys(near)) if near else "see `support.md`"
    return Unsupported(what, why="the support table has no such row", fix=fix)


def column_of(route: Route, column: str) -> str:
    """Return what a row has in a column, in words."""
    cells: dict[str, tuple[str, ...]] = {
        "activations": (route.activations,),
        "quantization": route.quantizations,
        "arch": tuple(arch for arch in Arch if arch in route.archs),
        "runner": (route.runner,),
        "dispatch": (route.dispatch,),
        "wire": (route.wire,),
        "finalize": route.finalize,
    }
    return " or ".join(cells[column])
