# SPDX-License-Identifier: Apache-2.0
"""What captured work relies on: that every tensor it reads stays where and what it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tetrarch.core.errors import AddressChanged

__all__ = ["Fingerprints"]

_Print = tuple[int, tuple[int, ...], tuple[int, ...], str]  # address, shape, strides, dtype


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Of named tensors, at one moment."""

    _prints: Mapping[str, _Print]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Fingerprints:
        """Take those of these tensors."""
        return cls({name: _print(tensor) for name, tensor in tensors.items()})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare with the same tensors as they are now.

        Raises:
            AddressChanged: It names every tensor that is gone, has moved or has another form.
        """
        moved = [
            name
            for name, old in self._prints.items()
            if name not in tensors or _print(tensors[name]) != old
        ]
        if moved:
            raise AddressChanged(
                f"captured graphs read {', '.join(moved)}, which moved",
                why="they replay with the addresses, shapes and types of their capture",
                fix="write weights in place (SlotTable.write_); to go on, restart the server",
            )

    def __len__(self) -> int:
        return len(self._prints)


def _print(tensor: Tensor) -> _Print:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)
