# SPDX-License-Identifier: Apache-2.0
"""Streamed text equals the text decoded at once, and never shows part of a stop string."""

from __future__ import annotations

import random

import pytest

from tetrarch.engine.request import FinishReason, SamplingParams
from tetrarch.engine.stream import OutputText, StopMatcher, TextStream
from tetrarch.engine.text import Tokenizer

ALPHABET = (
    *"abc XYZ,.\n\t'",
    *"é中文日本語한국어שלוםعربي",
    *"🙂👩‍👩‍👧‍👦🇨🇳🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301",
    "\u200b",
    "\ufffd",
    "\U0001d11e",
)


def stream(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> list[str]:
    text = TextStream(tokenizer, sampling)
    return [*(text.push(token) for token in ids), text.flush()]


def test_streamed_pieces_of_any_unicode_text_join_to_the_whole(demo_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 60)))
        ids = demo_tokenizer.encode(text, add_special_tokens=False)
        pieces = stream(demo_tokenizer, ids, SamplingParams())
        assert "".join(pieces) == demo_tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_pieces_of_random_bytes_join_to_the_whole(
    demo_tokenizer: Tokenizer, skip: bool
) -> None:
    rng = random.Random(1)
    sampling = SamplingParams(skip_special_tokens=skip)
    for length in [*range(1, 40), 300]:
        for _ in range(5):
            ids = [rng.randrange(demo_tokenizer.vocab_size + 6) for _ in range(length)]
            pieces = stream(demo_tokenizer, ids, sampling)
            assert "".join(pieces) == demo_tokenizer.decode(ids, skip_special_tokens=skip)


def test_streamed_pieces_join_where_characters_fall_back_to_bytes(
    fallback_tokenizer: Tokenizer,
) -> None:
    """Such decoders show every byte of an unfinished run as broken, then take it back."""
    rng = random.Random(3)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 30)):
            spelled = [4 + byte for byte in rng.choice("é国語🙂").encode()]
            ids += rng.choice([[1], [2], [3], spelled])
        pieces = stream(fallback_tokenizer, ids, SamplingParams())
        assert "".join(pieces) == fallback_tokenizer.decode(ids)
        assert "\ufffd" not in "".join(pieces)


def test_a_space_that_starts_an_output_is_kept_after_a_prompt(
    fallback_tokenizer: Tokenizer,
) -> None:
    text = TextStream(fallback_tokenizer, SamplingParams(), [1])
    assert text.push(2) == " world"


def test_no_piece_holds_half_a_character(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("🙂中🙂", add_special_tokens=False)
    assert len(ids) > 3, "the demo vocabulary must spell these characters byte by byte"
    assert [piece for piece in stream(demo_tokenizer, ids, SamplingParams()) if piece] == [
        "🙂",
        "中",
        "🙂",
    ]


def test_broken_bytes_do_not_hold_the_stream_back_for_ever(demo_tokenizer: Tokenizer) -> None:
    broken = next(
        token
        for token in range(demo_tokenizer.vocab_size)
        if demo_tokenizer.token_bytes(token) == b"\x80"
    )
    pieces = stream(demo_tokenizer, [broken] * 500, SamplingParams())
    assert "".join(pieces) == "\ufffd" * 500
    assert len("".join(pieces[:400])) > 390


def test_text_goes_on_where_the_prompt_ended(demo_tokenizer: Tokenizer) -> None:
    prompt, ids = (
        demo_tokenizer.encode("Hello wor"),
        demo_tokenizer.encode("ld again", add_special_tokens=False),
    )
    text = TextStream(demo_tokenizer, SamplingParams(), prompt)
    assert "".join([*(text.push(token) for token in ids), text.flush()]) == "ld again"


def cut(text: str, rng: random.Random) -> list[str]:
    pieces: list[str] = []
    while text:
        size = rng.randrange(1, 5)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_stop_strings_are_found_however_the_text_is_cut() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 30)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(3)]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        for keep in (False, True):
            matcher = StopMatcher(stops, keep=keep)
            shown: list[str] = []
            for piece in cut(text, rng):
                shown.append(matcher.push(piece))
                assert not any(stop in "".join(shown) for stop in stops) or keep
            shown.append(matcher.flush())
            if not ends:
                assert matcher.matched is None
                assert "".join(shown) == text
                continue
            assert matcher.matched is not None
            end = min(ends)
            start = end - max(len(stop) for stop in stops if text[:end].endswith(stop))
            assert "".join(shown) == text[: end if keep else start]


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END", "NEVER"])
    assert [matcher.push(piece) for piece in ("ab", "E", "N", "E", "x")] == [
        "ab",
        "",
        "",
        "E",
        "NEx",
    ]
    assert matcher.matched is None


def test_an_unarmed_matcher_lets_a_stop_string_pass() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) + matcher.push("a", armed=False) == "xab"
    assert matcher.push("b!", armed=True) == ""
    assert matcher.matched == "ab"


@pytest.mark.parametrize(("keep", "want"), [(False, "Hello wor"), (True, "Hello world ag")])
def test_a_stop_string_inside_a_token_run_cuts_the_text(
    demo_tokenizer: Tokenizer, keep: bool, want: str
) -> None:
    sampling = SamplingParams(stop=("ld ag",), no_stop_trim=keep)
    text = OutputText(demo_tokenizer, sampling)
    ids = demo_tokenizer.encode("Hello world again", add_special_tokens=False)
    shown = "".join(text.push([token]) for token in ids)
    assert text.matched == "ld ag"
    assert shown == want
    assert text.push([], FinishReason(kind="stop", matched="ld ag")) == ""


def spelled_in_bytes(text: str) -> list[int]:
    """Ids of the fallback tokenizer, a token for each byte."""
    return [4 + byte for byte in text.encode()]


@pytest.mark.parametrize("falls_back", [False, True], ids=["byte pairs", "byte fallback"])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_of_any_characters_are_found_across_tokens_and_deltas(
    demo_tokenizer: Tokenizer, fallback_tokenizer: Tokenizer, keep: bool, falls_back: bool
) -> None:
    """Characters of several tokens, stops of several characters, deltas of several tokens."""
    rng = random.Random(4)
    tokenizer = fallback_tokenizer if falls_back else demo_tokenizer
    num_found = 0
    for _ in range(150):
        text = "x" + "".join(rng.choices("ab é中文🙂👩‍👧🇨🇳", k=rng.randrange(2, 30)))
        stops = tuple(text[at : at + rng.randrange(1, 5)] for at in rng.choices(range(60), k=2))
        stops = tuple(filter(None, stops)) or ("🇨",)
        ids = (
            spelled_in_bytes(text)
            if falls_back
            else tokenizer.encode(text, add_special_tokens=False)
        )
        hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        end, length, wanted = min(hits, default=(len(text), 0, None))
        sampling = SamplingParams(stop=stops, no_stop_trim=keep)
        for longest in (1, 3, len(ids)):
            output, shown, rest = OutputText(tokenizer, sampling), "", list(ids)
            while rest and output.matched is None:
                size = rng.randrange(1, longest + 1)
                shown += output.push(rest[:size])
                rest = rest[size:]
            assert output.matched == wanted
            finish = FinishReason(kind="stop", matched=wanted)
            shown += output.push([], finish if wanted else FinishReason(kind="length"))
            assert shown == (text[:end] if keep else text[: end + length])
        num_found += wanted is not None
    assert num_found > 50  # else this shows little


def test_the_same_text_comes_from_one_delta_as_from_many(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("one two three four", add_special_tokens=False)
    sampling = SamplingParams(stop=("thr", "four"), min_new_tokens=len(ids))
    finish = FinishReason(kind="stop", matched="four")
    whole = OutputText(demo_tokenizer, sampling).push(ids, finish)
    pieces = OutputText(demo_tokenizer, sampling)
    assert "".join(pieces.push([token]) for token in ids) + pieces.push([], finish) == whole
    assert whole == "one two three "


def test_the_token_that_ended_an_output_is_not_shown(demo_tokenizer: Tokenizer) -> None:
    (comma,) = demo_tokenizer.encode(",", add_special_tokens=False)
    ids = demo_tokenizer.encode("one", add_special_tokens=False)
    finish = FinishReason(kind="stop", matched=comma)
    assert OutputText(demo_tokenizer, SamplingParams()).push([*ids, comma], finish) == "one"
    kept = OutputText(demo_tokenizer, SamplingParams(no_stop_trim=True))
    assert kept.push([*ids, comma], finish) == "one,"
