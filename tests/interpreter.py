# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, made to compute what the device computes.

Version 3.6 departs from it in ways that our kernels can see. FP32 is cut off where BF16 should be
rounded to nearest even, BF16's subnormals are widened to other numbers, `minimum` and `maximum`
return NaN where one operand is, though the device returns the other operand, `fma` rounds the
product, and `dot` multiplies the bits of BF16 as integers. Loops over bounds that a kernel computed
fail with numpy >= 2.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["repair"]

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def _convert_float(data: Any, source: Any, target: Any, rounding: object) -> Any:
    """Stand in for the interpreter's function of this name: bits in, bits out."""
    values = torch.from_numpy(np.array(data)).view(_DTYPES[source.name])
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[target.primitive_bitwidth]
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32}[target.primitive_bitwidth]
    return values.to(_DTYPES[target.name]).view(bits).numpy().view(unsigned)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Stand in for `InterpreterBuilder.create_fma`: FP64 holds FP32's products."""
    wide = [np.asarray(part.data, dtype=np.float64) for part in (x, y, z)]
    return type(z)((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)


def _dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
    """Stand in for `InterpreterBuilder.create_dot`: exact products, sums in `d`'s type."""
    wide = [
        torch.from_numpy(np.array(x.data)).view(_DTYPES[x.dtype.scalar.name]).float().numpy()
        if x.dtype.is_floating()
        else x.data
        for x in (a, b)
    ]
    return type(d)(np.matmul(*wide, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _interpret_language(interpreter: Any) -> None:
    """Interpret the functions of Triton's own language, whenever they were imported.

    transformers imports Triton, often before anybody asks for the interpreter.
    """
    language, compiled = interpreter.tl, interpreter.triton.runtime.jit.JITFunction
    for module in (language, language.standard, language.math):
        for name, member in list(vars(module).items()):
            if isinstance(member, compiled):
                setattr(module, name, interpreter.InterpretedFunction(member.fn))


def repair() -> None:
    """Repair the interpreter for this process."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    _interpret_language(interpreter)
    interpreter._convert_float = _convert_float
    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_fma = _fma
    builder.create_dot = _dot
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
