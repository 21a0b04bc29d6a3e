# SPDX-License-Identifier: Apache-2.0
"""Payloads for ranks: as many as ranks, base64, and not too large."""

from __future__ import annotations

import base64

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.serve import ranks
from tetrarch.serve.ranks import MOST_BYTES, decode_ranks


def test_every_rank_gets_its_bytes() -> None:
    parts = [b"", b"a", bytes(range(256))]
    encoded = [base64.b64encode(part).decode() for part in parts]
    assert decode_ranks(encoded, num_ranks=3) == parts


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_count_must_match(count: int) -> None:
    with pytest.raises(RequestError, match="tp_size is 2") as refused:
        decode_ranks(["QQ=="] * count, num_ranks=2)
    assert refused.value.param == "serialized_named_tensors"


@pytest.mark.parametrize("text", ["Q", "QQ", "Q===", "QQ==\n", "QQ==QQ==", "Q-Q_", "äöü=", "%%%%"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not base64") as refused:
        decode_ranks(["QQ==", text], num_ranks=2)
    assert "[1]" in refused.value.what


def test_too_large_a_payload_asks_for_smaller_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_BYTES < 1 << 32  # the length field of a msgpack bin
    monkeypatch.setattr(ranks, "MOST_BYTES", 6)
    assert decode_ranks(["QUFBQUFB"], num_ranks=1) == [b"AAAAAA"]
    with pytest.raises(RequestError, match="smaller buckets"):
        decode_ranks(["QUFBQUFBQUFB"], num_ranks=1)


def test_a_payload_of_many_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PIECE", 8)
    for size in range(40):
        text = base64.b64encode(bytes(range(size))).decode()
        assert decode_ranks([text], num_ranks=1) == [bytes(range(size))]
    for text in ("QUFBQUE=QUFB", "QUFBQQ==QQ==", "QUFBQUFBQ", "QUFBQUFB===="):
        with pytest.raises(RequestError, match="not base64"):
            decode_ranks([text], num_ranks=1)
