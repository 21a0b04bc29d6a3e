# SPDX-License-Identifier: Apache-2.0
"""Read a pickle without Python's unpickler: a stack machine that can call what a table admits.

A trainer's tensors arrive as a pickle, and unpickling runs what the pickle names. Subclassing
`pickle.Unpickler` leaves doors open beside `find_class`: cached extension codes skip it, `BUILD`
writes attributes of any object on the stack, and one memo index of 2³¹ allocates 32 GB. Here the
standard library only decodes opcodes (`pickletools.genops`, which calls nothing), and the machine
below has just the opcodes that a pickled list of tensors needs.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tetrarch.core.courtesy import gently
from tetrarch.core.errors import RequestError

__all__ = ["Record", "Row", "refused", "shown", "unpickle"]

# 50,000 tensors of 50 opcodes; each opcode can cost 64 bytes of memory and 1 µs.
_MAX_OPCODES = 5_000_000
_FIX = "send what torch's ForkingPickler makes of a list of (name, tensor) pairs or of a bucket"


@dataclass(frozen=True)
class Row:
    """One admitted global: its name, and what calling it does here.

    Attributes:
        name: Module and name, for messages.
        call: Our own implementation, or `None`: the name may be mentioned, never called.
        is_record: Objects of it are made without arguments and then filled with fields.
    """

    name: str
    call: Callable[..., object] | None = None
    is_record: bool = False


@dataclass(frozen=True)
class Record:
    """An object of an admitted class: its class's name and its fields; it has no methods."""

    name: str
    fields: dict[str, object] = field(default_factory=dict[str, object])


def refused(why: str, *, fix: str = _FIX) -> RequestError:
    """Return the error of a payload that is not taken."""
    return RequestError(
        "the tensor payload was refused", why=why, fix=fix, param="serialized_named_tensors"
    )


def shown(text: str) -> str:
    """Return `text` as it may stand in a message: quoted, escaped, at most 80 characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def unpickle(
    stream: io.BytesIO,
    table: Mapping[tuple[str, str], object],
    *,
    persistent: Callable[[object], object] | None = None,
) -> object:
    """Return the object of the pickle that starts at the stream's position; stop behind it.

    Args:
        stream: Bytes of protocol 2 or later.
        table: (module, name) → a `Row`, or the value itself for constants.
        persistent: What a persistent id stands for; `None`: there are none.

    Raises:
        RequestError: A global outside the table, an opcode that tensors do not need, or bytes
            that are no pickle. Nothing was called that the table does not admit.
    """
    machine = _Machine(table, persistent)
    try:
        for count, (opcode, argument, _) in enumerate(gently(pickletools.genops(stream))):
            if count == _MAX_OPCODES:
                raise refused(f"more than {_MAX_OPCODES:,} pickle opcodes")
            machine.step(opcode.name, argument)
        return machine.pop()
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        raise refused(f"it is damaged, or no pickle of tensors ({shown(str(error))})") from error


class _Machine:
    def __init__(
        self,
        table: Mapping[tuple[str, str], object],
        persistent: Callable[[object], object] | None,
    ) -> None:
        self._table, self._persistent = table, persistent
        self._stack: list[object] = []
        self._marked: list[list[object]] = []
        self._memo: dict[int, object] = {}

    def step(self, name: str, argument: object) -> None:
        """Carry out one opcode."""
        if name in _PUSHED:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _REMEMBERED:
            self._memo[_index(argument)] = self._stack[-1]
        elif name in _RECALLED:
            self._stack.append(self._memo[_index(argument)])
        elif name in _TUPLES:
            size = _TUPLES[name]
            self._stack[-size:] = [tuple(self._last(size))]
        elif name not in _IGNORED:
            if name not in _ACTIONS:
                raise refused(f"pickle opcode {name} has no place in a list of tensors")
            _ACTIONS[name](self, argument)

    def pop(self) -> object:
        """Take the top of the stack."""
        return self._stack.pop()

    def _last(self, size: int) -> list[object]:
        if len(self._stack) < size:
            raise IndexError(size)
        return self._stack[-size:]

    def _above_mark(self) -> list[object]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def mark(self, _: object) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def empty_list(self, _: object) -> None:
        self._stack.append([])

    def empty_dict(self, _: object) -> None:
        self._stack.append({})

    def tuple_above_mark(self, _: object) -> None:
        items = tuple(self._above_mark())
        self._stack.append(items)

    def append(self, _: object) -> None:
        self._extend([self.pop()])

    def appends(self, _: object) -> None:
        self._extend(self._above_mark())

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError("append to what is no list")
        target.extend(items)

    def setitem(self, _: object) -> None:
        value = self.pop()
        self._update([self.pop(), value])

    def setitems(self, _: object) -> None:
        self._update(self._above_mark())

    def _update(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("set an item of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):  # hashing a deeply nested tuple overflows the C stack
                raise TypeError("a key that is no text")
            target[key] = value

    def named_global(self, argument: object) -> None:
        module, _, name = str(argument).partition(" ")
        self._stack.append(self._look_up(module, name))

    def stack_global(self, _: object) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a global whose name is no text")
        self._stack.append(self._look_up(module, name))

    def _look_up(self, module: str, name: str) -> object:
        if (module, name) not in self._table:
            raise refused(
                f"it names {shown(f'{module}.{name}')}; only torch's tensor rebuild functions "
                "and the classes of weight buckets are admitted"
            )
        return self._table[module, name]

    def reduce(self, _: object) -> None:
        arguments, row = self.pop(), self.pop()
        if not (isinstance(row, Row) and isinstance(arguments, tuple)):
            raise TypeError("a call of what is no function")
        if row.call is None:
            raise refused(f"it calls {row.name}, which may only be mentioned")
        self._stack.append(row.call(*arguments))

    def newobj(self, _: object) -> None:
        arguments, row = self.pop(), self.pop()
        if not (isinstance(row, Row) and row.is_record and arguments == ()):
            raise TypeError("an object of what is no record class")
        self._stack.append(Record(row.name))

    def build(self, _: object) -> None:
        state, record = self.pop(), self._stack[-1]
        if not (isinstance(record, Record) and isinstance(state, dict)):
            raise TypeError("fields of what is no record")
        record.fields.update(state)  # keys are text: `_update` saw to it

    def persistent_id(self, _: object) -> None:
        if self._persistent is None:
            raise refused("it refers to objects outside itself (a persistent id)")
        self._stack.append(self._persistent(self.pop()))


def _index(argument: object) -> int:
    if not isinstance(argument, int):
        raise TypeError("a memo index that is no integer")
    return argument


_PUSHED = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
    ]
)
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONSTANTS["EMPTY_TUPLE"] = ()
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_REMEMBERED = frozenset({"BINPUT", "LONG_BINPUT"})
_RECALLED = frozenset({"BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})
_ACTIONS: dict[str, Callable[[_Machine, object], None]] = {
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_DICT": _Machine.empty_dict,
    "TUPLE": _Machine.tuple_above_mark,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.setitem,
    "SETITEMS": _Machine.setitems,
    "GLOBAL": _Machine.named_global,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.newobj,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent_id,
}
