# SPDX-License-Identifier: Apache-2.0
"""Patterns are found where they begin after what was shown, and none can hang the engine."""

from __future__ import annotations

import re
import time

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.patterns import MAX_MATCH, PatternStops, defect
from tetrarch.engine.request import SamplingParams
from tetrarch.engine.sampling import parse_sampling
from tetrarch.engine.stream import OutputText, StopMatcher
from tetrarch.engine.text import Tokenizer

EXPLODING = ["(x+x+)+y", "(?=(x+)+y)"]


def fed(matcher: StopMatcher, pieces: list[str]) -> str:
    shown = "".join(map(matcher.push, pieces))
    return shown if matcher.matched is not None else shown + matcher.flush()


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\d+ apples", "Mia has 12 apples.", "Mia has "),
        (r"(?i)the end", "It is THE END now", "It is "),
        (r"(?m)^Q:", "A: Q: no\nQ: yes", "A: Q: no\n"),
        (r"(?<=no )way", "way, no way", "way, no "),
        (r"\bcat\b.", "concat cat!", "concat "),
        (r"a.c", "ab abx", None),
        (r"^b", "abab", None),
    ],
)
def test_a_pattern_cuts_the_text_where_its_match_begins(
    pattern: str, text: str, shown: str | None
) -> None:
    for pieces in ([text], list(text), re.findall(r".{1,3}", text, re.DOTALL)):
        matcher = StopMatcher((), [pattern])
        assert fed(matcher, pieces) == (text if shown is None else shown)
        assert matcher.matched == (None if shown is None else pattern)


def test_what_may_begin_a_match_is_held_back_and_what_may_not_is_shown() -> None:
    matcher = StopMatcher((), [r"foo\d+bar"])
    assert matcher.push("a fo") == "a "
    assert matcher.push("o12") == ""
    assert matcher.push("x") == "foo12x"
    assert matcher.push("foo1bar, more") == ""
    assert matcher.matched == r"foo\d+bar"


def test_the_match_is_kept_on_request() -> None:
    assert fed(StopMatcher((), [r"\d+"], keep=True), ["a 1", "2"]) == "a 1"


def test_the_first_end_wins_between_strings_and_patterns() -> None:
    for stop, pattern, matched in (("cd", "bcde", "cd"), ("bcde", "cd", "cd"), ("bc", "b", "b")):
        matcher = StopMatcher([stop], [pattern])
        fed(matcher, list("abcdef"))
        assert matcher.matched == matched
    matcher = StopMatcher((), ["bcd", "c"])
    assert fed(matcher, ["abcdef"]) == "ab"
    assert matcher.matched == "c"


def test_an_unarmed_match_passes_and_does_not_count_later() -> None:
    matcher = StopMatcher((), [r"\d+"])
    assert matcher.push("a 12", armed=False) == "a 12"
    assert matcher.push(" b") == " b"
    assert matcher.push("3") == ""
    assert matcher.matched is not None


def test_text_is_held_for_the_longest_match_and_no_longer() -> None:
    matcher = StopMatcher((), ["<.*>"])
    assert "".join(map(matcher.push, "<" + "x" * (MAX_MATCH - 1))) == ""
    assert matcher.push("x") == "<"
    assert (
        matcher.push(">") == "x" * MAX_MATCH + ">"
    )  # what began with < was too long to be a match
    assert matcher.matched is None
    assert matcher.push("<>") == ""
    assert matcher.matched == "<.*>"


@pytest.mark.parametrize("pattern", EXPLODING)
def test_a_pattern_that_explodes_costs_a_moment_once(pattern: str) -> None:
    stops = PatternStops([pattern, "z"])
    began = time.thread_time()
    for _ in range(500):
        assert stops.push("x" * 4, armed=True) is None
    assert stops.too_slow == pattern
    assert time.thread_time() - began < 2.0  # of minutes, or years


def test_honest_patterns_never_run_out_of_time() -> None:
    stops = PatternStops([rf"\b(?:stop|halt|end){index}[.!?]" for index in range(32)])
    for _ in range(500):
        assert stops.push("they do not stop at all. ", armed=True) is None
    assert stops.too_slow is None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "unterminated"),
        ("a**", "multiple repeat"),
        ("(?R)", "unknown extension"),
        (r"\p{L}", "bad escape"),
        ("a*", "empty"),
        ("$", "empty"),
        ("((((a{999}){999}){999}){999})", "unroll"),
        ("(?x)(ab cd) {99} {99}", "repeat"),
        ("(?x)(abcd) # twice\n{9999}", "unroll"),
        ("(" * 120 + "a" + "){3}" * 33, "missing"),
        ("(" * 50 + "a" + "){3}" * 50, "unroll"),
    ],
)
def test_a_pattern_that_is_none_or_too_large_is_refused(pattern: str, why: str) -> None:
    began = time.thread_time()
    assert why in defect(pattern)
    assert time.thread_time() - began < 1.0
    with pytest.raises(RequestError) as caught:
        parse_sampling({"stop_regex": pattern}, vocab_size=10)
    assert caught.value.param == "stop_regex"


def test_an_output_is_cut_at_the_same_place_by_engine_and_door(demo_tokenizer: Tokenizer) -> None:
    sampling = parse_sampling({"stop_regex": r"is \d+\."}, vocab_size=1024)
    ids = demo_tokenizer.encode("The answer is 42. It is 42!")
    engine = OutputText(demo_tokenizer, sampling)
    count = next(n for n, one in enumerate(ids, 1) if (engine.push([one]), engine.matched)[1])
    assert demo_tokenizer.decode(ids[:count]).startswith("The answer is 42.")
    door = OutputText(demo_tokenizer, sampling)
    assert door.push(ids[:count]) == "The answer "
    assert door.matched == r"is \d+\."
    assert OutputText(demo_tokenizer, SamplingParams()).matched is None
