# SPDX-License-Identifier: Apache-2.0
"""Expert activations in FP32: the torch definition (numerics: 10.4)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["relu2", "swiglu"]


def swiglu(
    gate_up: Tensor, *, alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf
) -> Tensor:
    """Return `g * sigmoid(alpha * g) * (u + beta)`, gate and up clamped at `limit`.

    The gate is clamped from above only, up from both sides: gpt-oss's form. The defaults are
    plain SwiGLU.

    Args:
        gate_up: (N, 2I) fp32, gate before up.
        alpha: Steepness of the sigmoid.
        beta: Added to up.
        limit: Bound of both halves.

    Returns:
        (N, I) fp32.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit != math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return gated * (up + beta if beta else up)


def relu2(up: Tensor) -> Tensor:
    """Return `max(up, 0) ** 2`: (N, I) fp32 in and out. Scales must be in `up` already."""
    return up.relu().square()
