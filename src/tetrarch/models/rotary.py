# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of every position, made once and looked up, where the bits stay the same.

transformers computes sines and cosines in every forward, in ten torch calls: for one row on a CPU
0.1 ms, which a step with three drafts pays four times.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from tetrarch.models.skeleton import swap_module

__all__ = ["RotaryTable", "tabulate_rotary"]

_LARGEST = 32 << 20  # bytes of a model's tables; longer contexts compute theirs
_TRIED = (1, 3, 16, 33)  # positions at once


class RotaryTable(nn.Module):
    """Stands where a model has its rotary embedding.

    Args:
        tables: (1, positions, D) each, what the embedding returns of all positions in order.
        is_alone: It returns one tensor rather than a tuple.
    """

    def __init__(self, tables: tuple[Tensor, ...], *, is_alone: bool) -> None:
        super().__init__()
        self._tables = tuple(table[0] for table in tables)
        self._is_alone = is_alone

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, ...]:  # noqa: ARG002
        """Return the rows of `position_ids` (1, T), below the number of positions."""
        found = tuple(table.index_select(0, position_ids[0])[None] for table in self._tables)
        return found[0] if self._is_alone else found


@torch.no_grad()
def tabulate_rotary(
    model: nn.Module, *, num_positions: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Replace the rotary embedding of a model on a CPU.

    Args:
        model: With its buffers in place.
        num_positions: Those that it will be asked for.
        dtype: Of hidden states.
        device: Of the model; elsewhere than on a CPU nothing is replaced.
    """
    if device.type != "cpu":
        return
    rows = torch.empty(0, dtype=dtype, device=device)
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] != "rotary_emb" or not _takes_positions_alone(module):
            continue
        one = _as_tuple(module(rows, torch.zeros(1, 1, dtype=torch.int64)))
        if num_positions * sum(table.nbytes for table in one) > _LARGEST:
            continue
        every = module(rows, torch.arange(num_positions)[None])
        ours = RotaryTable(_as_tuple(every), is_alone=isinstance(every, Tensor))
        if all(_agree(ours, module, rows, count, num_positions) for count in _TRIED):
            swap_module(model, path, ours)


def _takes_positions_alone(module: nn.Module) -> bool:
    return list(inspect.signature(module.forward).parameters) == ["x", "position_ids"]


def _as_tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def _agree(
    ours: nn.Module, theirs: nn.Module, rows: Tensor, count: int, num_positions: int
) -> bool:
    """Try both on so many positions; one alone is the last."""
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(num_positions, (1, count), generator=generator)
    if count == 1:
        positions.fill_(num_positions - 1)
    pairs = zip(_as_tuple(ours(rows, positions)), _as_tuple(theirs(rows, positions)), strict=True)
    return all(torch.equal(*pair) for pair in pairs)
