# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms in two operations instead of eight, where the bits stay the same.

transformers spells a norm out: widen, square, mean, add, root, multiply, narrow, weigh. torch has
all but the last in one call, which for one row on a CPU takes two thirds of the time; a model of
six layers has 25 norms.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tetrarch.models.skeleton import swap_module

__all__ = ["RootMeanSquareNorm", "fuse_norms"]

_ROWS = 16  # of the trial; their magnitudes reach from far below epsilon's root to far above


class RootMeanSquareNorm(nn.Module):
    """`weight * x / sqrt(mean(x²) + eps)`, FP32 inside, rounded to x's dtype before the weight."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self._shape, self._eps = weight, weight.shape, eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm over the last dimension."""
        return self.weight * torch.rms_norm(hidden_states, self._shape, None, self._eps)


def fuse_norms(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Replace each norm that ours equals bit for bit; its weight keeps its name.

    gpt-oss's rounds after the weight: equal in FP32, in BF16 it stays.

    Args:
        model: May be on `meta`.
        dtype: Of hidden states.
        device: Where the model will run, hence where equality is tried.
    """
    if device.type == "meta":
        return  # nothing can be tried there, and nothing will run
    for path, module in list(model.named_modules()):
        eps = vars(module).get("variance_epsilon")
        if isinstance(eps, float) and _takes_one_tensor(module):
            ours = RootMeanSquareNorm(module.get_parameter("weight"), eps)
            if _agree(ours, module, dtype=dtype, device=device):
                swap_module(model, path, ours)


def _takes_one_tensor(module: nn.Module) -> bool:
    """Whether the module has one weight and its forward one argument."""
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and len(inspect.signature(module.forward).parameters) == 1


@torch.no_grad()
def _agree(
    ours: RootMeanSquareNorm, theirs: nn.Module, *, dtype: torch.dtype, device: torch.device
) -> bool:
    """Try both on random rows, with a random weight."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-6, 3, _ROWS)[:, None]
    rows = (torch.randn(_ROWS, ours.weight.numel(), generator=generator) * size).to(device, dtype)
    weight = torch.randn(ours.weight.shape, generator=generator).to(device, ours.weight.dtype)
    return torch.equal(
        *(functional_call(norm, {"weight": weight}, (rows,)) for norm in (ours, theirs))
    )
