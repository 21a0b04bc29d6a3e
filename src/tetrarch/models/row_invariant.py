# SPDX-License-Identifier: Apache-2.0
"""Run somebody else's model so that a row's bits do not depend on the other rows.

transformers' layers call torch as they like, routers among them call `F.linear` themselves. So it
is the calls that are replaced, not the modules: while `RowInvariant` is entered, every torch
function passes through it. Some are known to treat each row alike and pass; some are replaced by
ours that do; any other one is refused. Hence a model that does something new cannot lose the
property unnoticed: its first forward, before anything is served, names the function.

A call costs about a microsecond more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from tetrarch.core.errors import Unsupported
from tetrarch.core.registry import Registry
from tetrarch.kernels.pointwise import uniform

__all__ = ["RowInvariant"]

# From this length torch may split one sum among threads, and one row is then not like many.
_LONGEST_SUM = 32768
# On a GPU it splits from 768 on, if there are few rows (torch 2.11, H200).
_LONGEST_SUM_ON_GPU = 128

_PRODUCTS = Registry(
    {
        "cpu": "tetrarch.kernels.matmul.tiled:tiled_linear",
        "cuda": "tetrarch.kernels.matmul.triton:multiply",
    }
)
_ROW_SUMS = Registry({"cuda": "tetrarch.kernels.pointwise.triton:row_sum"})

# Functions, methods and attributes by their names, without the underscores around them.
_SAME_ELEMENTS = """
    arange as_strided bool cat chunk clone contiguous copy cpu device dim dtype embedding empty
    expand flatten float gather getitem index_copy index_fill index_select int len long mT
    masked_fill ndim new_empty new_zeros numel numpy ones_like permute promote_types reshape scatter
    set_grad_enabled setitem shape size split split_with_sizes squeeze stride tensor to topk
    transpose type type_as unbind unflatten unsqueeze view view_as_complex view_as_real where zero
    zeros zeros_like
"""
# What a launch of a kernel, or of its interpreter, asks of its arguments.
_LOOKS = """
    data_ptr element_size empty_like is_contiguous is_cuda itemsize nbytes set storage_offset
    untyped_storage
"""
_ONE_RIGHT_ANSWER = """
    abs add amax and clamp copysign div gt invert le logical_not lt max min mul nan_to_num neg or
    reciprocal relu rsub sqrt square sub threshold
"""
_ONE_IMPLEMENTATION = "cos exp polar rms_norm sin tanh"  # be it for many or for one: measured
_PASS = frozenset(f"{_SAME_ELEMENTS} {_LOOKS} {_ONE_RIGHT_ANSWER} {_ONE_IMPLEMENTATION}".split())


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = _product(rows)(rows.flatten(0, -2), weight, bias=bias)
    return found.unflatten(0, rows.shape[:-1])


def _matmul(rows: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    if rows.shape[-1] == 1:  # rotary angles: positions times frequencies
        return rows * weight
    if weight.ndim != 2 or (out is not None and rows.ndim != 2):
        raise _refusal("a product of two batches of matrices")
    if out is not None:
        return _product(rows)(rows, weight.mT, out=out)
    return _linear(rows, weight.mT)


def _product(rows: Tensor) -> Callable[..., Tensor]:
    return _PRODUCTS[rows.device.type]


def _power(values: Tensor, exponent: float) -> Tensor:
    if exponent != 2:
        raise _refusal(f"the power {exponent}")
    return values * values


def _summed(
    values: Tensor,
    keepdim: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    mean: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum or the mean over the last dimension."""
    total: Tensor = _ROW_SUMS[values.device.type](values)
    found = (total / values.shape[-1] if mean else total).to(dtype or values.dtype)
    return found[..., None] if keepdim else found


def _along_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function, refused where it would cross from one row to another."""

    def checked(
        values: Tensor, dim: int | Sequence[int] | None = None, *rest: Any, **more: Any
    ) -> Tensor:
        axes = (dim,) if isinstance(dim, int) else tuple(dim or ())
        last = axes in ((-1,), (values.ndim - 1,)) and values.ndim > 1
        width = values.shape[-1]
        if not last or width > _LONGEST_SUM:
            raise _refusal(f"{function.__name__} of {tuple(values.shape)} over {dim}")
        summed = function.__name__ != "softmax" and values.device.type in _ROW_SUMS
        if summed and width > _LONGEST_SUM_ON_GPU:
            return _summed(values, *rest, mean=function.__name__ == "mean", **more)
        return function(values, dim, *rest, **more)

    return checked


_REPLACED: Mapping[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "pow": _power,
    "rsqrt": uniform.rsqrt,
    "sigmoid": uniform.sigmoid,
    "silu": uniform.silu,
}
_ALONG_ROWS = frozenset(("mean", "softmax", "sum"))


class RowInvariant(TorchFunctionMode):
    """While it is entered, torch functions give a row the same bits at any number of rows.

    Raises:
        Unsupported: From a call of a function of which that is not known.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass the call on, to torch or to ours."""
        return _chosen(func)(*args, **kwargs) if kwargs else _chosen(func)(*args)


@functools.cache
def _chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    # An attribute arrives as the `__get__` of its descriptor.
    described = function.__self__ if function.__name__ == "__get__" else function  # pyright: ignore
    name: str = described.__name__  # pyright: ignore
    if name in _REPLACED:
        return _REPLACED[name]
    if name in _ALONG_ROWS:
        return _along_rows(function)
    if name.strip("_") in _PASS:
        return function
    raise _refusal(resolve_name(function) or name)


def _refusal(what: str) -> Unsupported:
    return Unsupported(
        f"--deterministic cannot serve this model: it uses {what}",
        why="nobody has shown that it gives a row the same bits whatever other rows there are",
        fix="leave --deterministic out, or serve another model",
    )
