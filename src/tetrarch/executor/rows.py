# SPDX-License-Identifier: Apache-2.0
"""What is kept of each row from step to step: pages on the host, the last token on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.executor.step import SeqChunk

__all__ = ["RowMemory"]


class RowMemory:
    """Of so many rows as there may be running sequences.

    A sequence gets a page every 16 tokens, so most rows of a page table are those of the step
    before: writing all pages of 64 sequences of 32k tokens anew would take longer than their step.

    Attributes:
        last_ids: (rows,) int64 on the device, what each row has drawn last; `FUTURE` is that.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self.last_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._held: list[tuple[int, ...]] = [()] * num_rows
        self._table = np.zeros((num_rows, 1), np.int32)

    def page_table(self, seqs: Sequence[SeqChunk]) -> NDArray[np.int32]:
        """Return the pages of R sequences as rows: (R, P), padded with 0."""
        width = max((len(seq.pages) for seq in seqs), default=0)
        if width > self._table.shape[1]:
            more = np.zeros((len(self._held), width), np.int32)  # twice as wide as needed
            self._table = np.concatenate((self._table, more), axis=1)
        for seq in seqs:
            if self._held[seq.row] is not seq.pages:
                self._held[seq.row] = seq.pages
                self._table[seq.row, : len(seq.pages)] = seq.pages
                self._table[seq.row, len(seq.pages) :] = 0
        return self._table[[seq.row for seq in seqs], :width]

    def note_drawn(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep what was drawn for each row; a broken row's next token may be anything valid.

        Args:
            rows: (N,) int64; those of a verification repeat, and nobody may count on theirs.
            token_ids: (N,) int64, -1 for a broken one.
        """
        self.last_ids[rows] = token_ids.clamp(min=0)
