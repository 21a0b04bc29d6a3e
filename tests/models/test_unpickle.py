# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.models import unpickle as module
from tetrarch.models.unpickle import Record, Row, refused, shown, unpickle

TABLE: dict[tuple[str, str], object] = {
    ("torch", "Tensor"): Row("torch.Tensor"),
    ("torch", "Size"): Row("torch.Size", tuple),
    ("torch", "int8"): "a constant",
    ("a", "Part"): Row("Part", is_record=True),
}


def read(payload: bytes, persistent: Callable[[object], object] | None = None) -> object:
    return unpickle(io.BytesIO(payload), TABLE, persistent=persistent)


def _op(text: bytes) -> bytes:
    return b"\x80\x04" + text + b"."


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    shared = ["x", (1, 2)]
    value = {
        "numbers": [0, 255, 70_000, -1, 2**40, -(2**90), 0.5, True, False, None],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "texts": ["", "Ω", "x" * 300, b"", b"\0", b"y" * 300],
        "shared": [shared, shared, {}, [[]]],
    }
    got = read(pickle.dumps(value, protocol=protocol))
    assert got == value
    assert got["shared"][0] is got["shared"][1]  # type: ignore[index]


def test_what_the_table_admits_is_called_and_mentioned() -> None:
    assert read(_op(b"ctorch\nSize\n](K\x01K\x02e\x85R")) == (1, 2)
    assert read(_op(b"\x8c\x05torch\x8c\x04int8\x93")) == "a constant"
    assert read(_op(b"\x8c\x05torch\x8c\x06Tensor\x93")) is TABLE["torch", "Tensor"]


def test_a_record_is_filled_with_fields() -> None:
    got = read(_op(b"ca\nPart\n)\x81}\x8c\x04nameK\x05sb"))
    assert got == Record("Part", {"name": 5})


def test_a_persistent_id_is_what_the_caller_says() -> None:
    assert read(_op(b"K\x05Q"), lambda value: [value]) == [5]


def test_the_stream_stops_behind_the_pickle() -> None:
    stream = io.BytesIO(pickle.dumps(1) + pickle.dumps(2) + b"rest")
    assert [unpickle(stream, {}), unpickle(stream, {}), stream.read()] == [1, 2, b"rest"]


def _mark(*arguments: object) -> str:
    raise AssertionError(arguments)


class Marked:
    def __reduce__(self) -> tuple[Callable[..., str], tuple[int]]:
        return _mark, (1,)


def test_an_extension_code_does_not_lead_around_the_table() -> None:
    """Python's own unpickler takes a cached extension without asking `find_class`."""
    copyreg.add_extension(__name__, "_mark", 0x1234)
    try:
        payload = pickle.dumps(Marked(), protocol=2)
        assert pickle.EXT2 in payload
        with pytest.raises(RequestError, match="EXT2"):
            read(payload)
    finally:
        copyreg.remove_extension(__name__, "_mark", 0x1234)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b".",
        b"\x80",
        b"\x80\x04",
        b"\x80\xff.",
        b"hello",
        _op(b""),
        _op(b"\x85"),  # a tuple of what is not there
        _op(b"t"),
        _op(b"h\x05"),
        _op(b"r\xff\xff\xff\x7f"),
        _op(b"j\xff\xff\xff\x7f"),
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x",  # one terabyte of bytes
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62),
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x",
        b"\x80\x04\x8b" + struct.pack("<I", 2**31 - 1),
        _op(b"}(K\x01K\x02u"),  # a key that is no text
        _op(b"}" + b"(" * 20_000 + b"t" * 20_000 + b"Ns"),  # a hash as deep as the C stack
        _op(b"\x8c\x05torch\x8c\x06Tensor\x93)R"),  # mentioned, called
        _op(b"\x8c\x05torch\x8c\x06Tensor\x93}b"),  # attributes of a class
        _op(b"\x8c\x05torch\x8c\x06Tensor\x93)\x81"),
        _op(b"\x8c\x05torch\x8c\x04Size\x93N\x85R"),
        _op(b"ctorch\nTensor.__init__\n"),
        _op(b"Pid\n"),
        _op(b"NQ"),
        _op(b"K\x01K\x02b"),
        _op(b"(cos\nsystem\no"),
        _op(b"(ios\nsystem\n"),
    ],
)
def test_damaged_pickles_are_refused(payload: bytes) -> None:
    with pytest.raises(RequestError):
        read(payload)


def test_a_high_memo_index_or_a_long_frame_costs_nothing() -> None:
    """Python's own unpickler allocates 32 GB for an index of 2³¹."""
    assert read(b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.") is None
    assert read(_op(b"]r\xff\xff\xff\x7f")) == []


def test_endless_opcodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OPCODES", 1000)
    with pytest.raises(RequestError, match="1,000 pickle opcodes"):
        read(_op(b"]" * 2000))


def test_messages_stay_short_and_printable() -> None:
    assert len(shown("x" * 10**6)) < 100
    shown("\udc80").encode()
    assert refused("why").param == "serialized_named_tensors"
