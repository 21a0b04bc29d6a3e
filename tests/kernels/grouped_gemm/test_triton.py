# SPDX-License-Identifier: Apache-2.0
"""The Triton grouped GEMM against float64, bit for bit where sums are exact."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import repair
from tetrarch.kernels.activation.reference import relu2, swiglu
from tetrarch.kernels.grouped_gemm.packing import interleave, pack_codes, pack_plain, pack_scales
from tetrarch.kernels.grouped_gemm.tiles import Tile, max_blocks, tile_for
from tetrarch.numerics import nvfp4
from tolerance import GPU_EXP, assert_close

pytest.importorskip("triton", reason="pip install tetrarch[test-kernels]")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
gemm = pytest.importorskip("tetrarch.kernels.grouped_gemm.triton")
permute = pytest.importorskip("tetrarch.kernels.permute.triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BEYOND = 1 << 20  # a slot that is none
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
# The others take their time in `make check-slow`.
ARCHS = [pytest.param(a, marks=() if a == 90 else pytest.mark.slow) for a in SHARED_BYTES]
SHAPES = [(4, 32, 64), (4, 80, 48), (2, 144, 128)]


def order_of(ids: Tensor, num_experts: int, tokens: int) -> Any:
    """Sort slots by expert on the host; ids outside `0 .. num_experts - 1` form no block."""
    flat, slots, experts = ids.flatten().tolist(), [], []
    for expert in range(num_experts):
        mine = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        slots += mine + [BEYOND] * (-len(mine) % tokens)
        experts += [expert] * -(-len(mine) // tokens)
    used = torch.tensor([len(experts)], dtype=torch.int32)
    most = max_blocks(len(flat), num_experts, tokens)
    slots += [BEYOND] * (most * tokens - len(slots))
    experts += [-1] * (most - len(experts))  # must not be read
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (slots, experts))
    device = ids.device
    slots, experts = (tensor.to(device) for tensor in tensors)
    owned = (ids.flatten() >= 0) & (ids.flatten() < num_experts)
    return permute.Alignment(
        sorted_slots=slots, expert=experts, num_blocks=used.to(device), owned=owned
    )


class Case:
    """Random NVFP4 weights and NVFP4 rows, whose sums FP32 holds exactly."""

    def __init__(
        self, experts: int, rows: int, width: int, *, device: Any, tokens: int = 9
    ) -> None:
        generator = torch.Generator().manual_seed(rows + width)
        weight = torch.randn(experts * rows, width, generator=generator)
        codes, scales, _ = nvfp4.encode_weight(weight, recipe=None)
        x = torch.randn(tokens, width, generator=generator).bfloat16()
        values, self.row_scale = nvfp4.fake_quant_per_token(x, dtype=BF16)
        self.ids = torch.randint(0, experts, (tokens, 2), generator=generator).to(device)
        self.scale = torch.rand(experts, 2, generator=generator).to(device)
        self.bias = torch.randn(experts, rows, generator=generator).to(device)
        self.values, self.row_scale = values.to(device), self.row_scale.to(device)
        self.codes = codes.view(experts, rows, -1).to(device)
        self.block_scale = scales.view(experts, rows, -1).to(device)
        exact = nvfp4.decode_exact_products(codes, scales, dtype=FP32)
        self.weight = exact.view(experts, rows, width).to(device)
        self.experts, self.rows, self.width = experts, rows, width

    def sums(self, values: Tensor | None = None) -> Tensor:
        """Rows times their experts' weights in float64, rounded to FP32: (tokens, 2, rows)."""
        rows = (self.values if values is None else values).double()
        return torch.einsum("tnk,tk->tn", *self._flat(rows)).float().view(*self.ids.shape, -1)

    def _flat(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight.double()[self.ids.flatten()], rows.repeat_interleave(2, dim=0)

    def packed(self, *, gated: bool = False, bias: bool = False) -> Any:
        mixed = interleave if gated else torch.Tensor.contiguous
        block_scale = mixed(self.block_scale.view(torch.uint8)).view(torch.float8_e4m3fn)
        return gemm.Weight(
            pack_codes(mixed(self.codes)),
            pack_scales(block_scale),
            self.scale if gated else self.scale[:, :1].contiguous(),
            self.bias if bias else None,
            self.rows,
        )

    def tile(self, *, ptx: bool | None = None, dtype: torch.dtype = BF16, **changes: Any) -> Tile:
        on_gpu = self.values.is_cuda
        tile = tile_for(16, self.width, packed=True, dtype=dtype, ptx=on_gpu)
        return replace(tile, **changes, ptx=tile.ptx if ptx is None else ptx)

    def run(self, weight: Any, out: Tensor, tile: Tile | None = None, **epilogue: Any) -> Tensor:
        tile = tile or self.tile()
        return gemm.grouped_gemm(
            self.values,
            weight,
            order=order_of(self.ids, self.experts, tile.tokens),
            tile=tile,
            epilogue=gemm.Epilogue(out=out, **epilogue),
            row_scale=self.row_scale,
        )

    def empty(self, rows: int | None = None, dtype: torch.dtype = FP32) -> Tensor:
        shape = self.ids.numel(), self.rows if rows is None else rows
        return torch.full(shape, torch.nan, dtype=dtype, device=self.values.device)


@pytest.mark.parametrize("ptx", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_code_under_every_scale_decodes_exactly(device: torch.device, ptx: bool) -> None:
    """The identity as rows returns the weights: 16 codes under 127 scales."""
    codes = torch.arange(16, dtype=torch.uint8)
    codes = (codes[::2] | codes[1::2] << 4).repeat(1, 128, 1).to(device)
    block_scale = torch.arange(128, dtype=torch.uint8, device=device).clamp(max=126)
    block_scale = block_scale.view(1, 128, 1).view(torch.float8_e4m3fn)
    rows = torch.eye(16, dtype=BF16, device=device)
    weight = gemm.Weight(pack_codes(codes), pack_scales(block_scale), None, None, 128)
    ids = torch.zeros(16, 1, dtype=torch.int32, device=device)
    out = torch.full((16, 128), torch.nan, device=device)
    tile = replace(tile_for(16, 16, packed=True, dtype=BF16, ptx=False), ptx=ptx)
    order = order_of(ids, 1, 16)
    gemm.grouped_gemm(rows, weight, order=order, tile=tile, epilogue=gemm.Epilogue(out=out))
    want = nvfp4.decode_exact_products(codes[0], block_scale[0], dtype=FP32)
    assert torch.equal(out.T, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_are_scaled_as_the_reference_scales_them(
    device: torch.device, shape: tuple[int, int, int]
) -> None:
    case = Case(*shape, device=device)
    out = case.run(case.packed(), case.empty())
    factor = case.scale[case.ids, :1] * case.row_scale[:, None, None]
    assert torch.equal(out.view(*case.ids.shape, -1), case.sums() * factor)


def test_a_bias_is_added_after_the_scale_with_a_rounding_of_its_own(device: torch.device) -> None:
    case = Case(4, 80, 48, device=device)
    out = case.run(case.packed(bias=True), case.empty())
    factor = case.scale[case.ids, :1] * case.row_scale[:, None, None]
    scaled = case.sums() * factor
    assert torch.equal(out.view_as(scaled), scaled + case.bias[case.ids])
    fused = (case.sums().double() * factor.double() + case.bias[case.ids].double()).float()
    assert not torch.equal(out.view_as(fused), fused)  # so the two could be told apart


@pytest.mark.parametrize("clamped", [False, True])
def test_gate_and_up_have_scales_of_their_own(device: torch.device, clamped: bool) -> None:
    case = Case(4, 96, 64, device=device)
    how = {"alpha": 1.702, "beta": 1.0, "limit": 0.5} if clamped else {}
    out = case.run(case.packed(gated=True, bias=True), case.empty(48), activation="swiglu", **how)
    factor = case.scale[case.ids] * case.row_scale[:, None, None]
    z = case.sums().unflatten(2, (2, 48)) * factor[..., None]
    z = z.flatten(2) + case.bias[case.ids]
    assert_close(out.view(*case.ids.shape, -1), swiglu(z, **how), GPU_EXP)


def test_relu2_squares_what_is_scaled(device: torch.device) -> None:
    case = Case(4, 80, 48, device=device)
    out = case.run(case.packed(), case.empty(), activation="relu2")
    z = case.sums() * (case.scale[case.ids, :1] * case.row_scale[:, None, None])
    assert torch.equal(out.view_as(z), relu2(z))


def test_slots_of_other_ranks_are_left_alone(device: torch.device) -> None:
    """Ids outside this rank's experts form no block; an expert nobody chose is no trouble."""
    case = Case(4, 32, 64, device=device)
    case.ids = torch.tensor([[1, 7]] * 8 + [[-1, 1]], device=device)
    out = case.run(case.packed(), case.empty()).view(9, 2, 32)
    assert torch.equal(out.isnan().any(2), case.ids != 1)


def test_no_tokens_start_no_program(device: torch.device) -> None:
    case = Case(4, 32, 64, device=device)
    case.ids, case.values = case.ids[:0], case.values[:0]
    assert case.run(case.packed(), case.empty()).shape == (0, 32)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_plain_weights_take_the_same_path(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(4, 80, 48, device=device)
    values, weight = (torch.randn_like(t, dtype=FP32).to(dtype) for t in (case.values, case.weight))
    case.values, case.weight = values, weight
    plain = gemm.Weight(pack_plain(weight), None, None, None, 80)
    tile = tile_for(16, 48, packed=False, dtype=dtype, ptx=device.type == "cuda")
    case.row_scale = None
    out = case.run(plain, case.empty(), tile)
    torch.testing.assert_close(out.view(*case.ids.shape, -1), case.sums(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_rows_of_other_dtypes_meet_exact_weights(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(4, 80, 48, device=device)
    case.values = case.values.to(dtype)  # FP16 holds every product, too
    out = case.run(case.packed(), case.empty(), case.tile(dtype=dtype))
    factor = case.scale[case.ids, :1] * case.row_scale[:, None, None]
    assert torch.equal(out.view(*case.ids.shape, -1), case.sums() * factor)


def test_added_rows_are_rounded_and_weighed_first(device: torch.device) -> None:
    """Two rows a token: an atomic sum of two has one order only, up to its zero."""
    case = Case(4, 80, 48, device=device)
    weights = torch.rand(9, 2, device=device)
    out = torch.zeros(9, 80, device=device)
    case.run(case.packed(), out, topk_weights=weights)
    z = case.sums() * (case.scale[case.ids, :1] * case.row_scale[:, None, None])
    assert torch.equal(out, (z.bfloat16().float() * weights[..., None]).sum(1))


def test_results_are_stored_in_their_own_dtype(device: torch.device) -> None:
    case = Case(4, 32, 64, device=device)
    whole = case.run(case.packed(), case.empty())
    assert torch.equal(case.run(case.packed(), case.empty(dtype=BF16)), whole.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 1536, 2048), (4, 2048, 768)], ids=str)
def test_no_tile_and_no_neighbour_moves_a_bit(shape: tuple[int, int, int]) -> None:
    """Unrounded rows, whose sums are not exact: every tile, PTX or not, adds in the same order."""
    case = Case(*shape, device="cuda", tokens=300)
    case.values = torch.randn_like(case.values)
    first = case.run(case.packed(), case.empty(), case.tile(ptx=False))
    for tokens in (16, 32, 64):
        tile = tile_for(tokens, shape[2], packed=True, dtype=BF16, ptx=True)
        assert torch.equal(case.run(case.packed(), case.empty(), tile), first)
    case.ids, case.values, case.row_scale = case.ids[:3], case.values[:3], case.row_scale[:3]
    assert torch.equal(case.run(case.packed(), case.empty()), first[:6])


def compile_forms(archs: str, *forms: str) -> list[tuple[int, int, int, str]]:
    """Return architecture, shared memory, cubin size, and whether products are waited for.

    Compiled where no interpreter is on.
    """
    script = Path(__file__).with_name("compile_gemm.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), archs, *forms]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    return [(int(arch), int(shared), int(size), waits) for arch, _, _, shared, size, waits in lines]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_of_decoding_compiles(arch: int) -> None:
    ((_, shared, size, _),) = compile_forms(str(arch), "per-token-swiglu/16")
    assert shared <= SHARED_BYTES[arch]
    assert size > 1000


def test_weights_are_not_decoded_into_registers_that_a_product_reads() -> None:
    """`_settled` in the kernel; without it Triton 3.6.0 does, and a layer's bits come and go."""
    compiled = compile_forms("90", "per-token-swiglu/64", "w4a16-clamped/64", "fp16/64")
    assert [waits for *_, waits in compiled] == ["yes"] * 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_form_compiles_for_every_architecture(arch: int) -> None:
    compiled = compile_forms(str(arch))
    assert len(compiled) == 7 * 3 + 2 * 4  # blocks of 16 to 64 tokens; without packing also 128
    assert all(shared <= SHARED_BYTES[arch] for _, shared, _, _ in compiled)
