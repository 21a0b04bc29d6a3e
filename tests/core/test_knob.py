# SPDX-License-Identifier: Apache-2.0
"""A setting is declared once, and read strictly."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from tetrarch.core.errors import ConfigError
from tetrarch.core.knob import Alias, Knob, KnobField, knobs, parse_switch


@dataclass(frozen=True)
class Settings:
    """Something with a knob of every kind."""

    switch: Annotated[bool, Knob("Switches. Then more words")] = False
    count: Annotated[int, Knob("Counts", unit="tokens", at_least=1, at_most=9)] = 3
    maybe: Annotated[int | None, Knob("Counts or not")] = None
    share: Annotated[float | None, Knob("Shares", at_most=1)] = None
    name: Annotated[str | None, Knob("Names", also=(Alias("--other"), Alias("OTHER")))] = None
    key: Annotated[str | None, Knob("Opens", secret=True)] = None
    kind: Annotated[
        str, Knob("Kinds", choices=("a", "b"), refused=("c",), synonyms=(("alpha", "a"),))
    ] = "a"
    only: Annotated[int | None, Knob("Has one value", at_least=1, at_most=1)] = None
    some: Annotated[tuple[str, ...], Knob("Lists")] = ()


KNOBS = {each.name: each for each in knobs(Settings)}


def knob(name: str) -> KnobField:
    return KNOBS[name]


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("name", ["name", "key"])
def test_an_empty_text_is_no_value(name: str, text: str) -> None:
    """`--key "$KEY"` where KEY is not set must not open the door."""
    with pytest.raises(ConfigError, match="non-empty"):
        knob(name).parse(text, spelling=f"--{name}")
    with pytest.raises(ConfigError, match="non-empty"):
        knob(name).check(text, spelling=name)


def test_flag_and_variable_follow_from_the_name() -> None:
    @dataclass(frozen=True)
    class One:
        max_total_tokens: Annotated[int, Knob("Bounds")] = 1

    (only,) = knobs(One)
    assert (only.flag, only.env) == ("--max-total-tokens", "TETRARCH_MAX_TOTAL_TOKENS")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("switch", "1", True),
        ("switch", "On", True),
        ("switch", "no", False),
        ("count", "9", 9),
        ("maybe", "auto", None),
        ("maybe", "-4", -4),
        ("share", "1/2688", 1 / 2688),
        ("share", "2.5e-1", 0.25),
        ("name", "auto", None),
        ("kind", "alpha", "a"),
        ("kind", "Alpha", "a"),
        ("kind", "c", "c"),
        ("some", "x, y,,z", ("x", "y", "z")),
        ("some", "", ()),
    ],
)
def test_text_is_read(name: str, text: str, value: object) -> None:
    assert knob(name).parse(text, spelling="--x") == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("switch", "maybe"),
        ("count", "ten"),
        ("count", "1.5"),
        ("count", "0"),
        ("count", "10"),
        ("count", "auto"),
        ("share", "1/0"),
        ("share", "nan"),
        ("share", "1.01"),
        ("kind", "d"),
    ],
)
def test_malformed_text_is_an_error_that_names_the_spelling(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        knob(name).parse(text, spelling="TETRARCH_X")
    assert caught.value.what.startswith("TETRARCH_X:")
    assert text in caught.value.what
    assert knob(name).show(knob(name).default) in caught.value.fix


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("switch", True, True),
        ("maybe", None, None),
        ("share", 1, 1.0),
        ("name", Path("/a/b"), "/a/b"),
        ("kind", "alpha", "a"),
        ("some", ["x", "y"], ("x", "y")),
        ("some", "x,y", ("x", "y")),
    ],
)
def test_python_values_are_accepted(name: str, value: object, kept: object) -> None:
    checked = knob(name).check(value, spelling="x")
    assert checked == kept
    assert type(checked) is type(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("switch", 1),
        ("switch", "on"),
        ("count", True),
        ("count", "3"),
        ("count", None),
        ("count", 10),
        ("share", "0.5"),
        ("name", 3),
        ("some", [1]),
        ("some", {"x": 1}),
    ],
)
def test_python_values_of_another_type_are_errors(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="x: "):
        knob(name).check(value, spelling="x")


def test_a_secret_is_never_shown() -> None:
    assert knob("key").show("hush") == "***"
    assert knob("key").show(None) == "not set"
    with pytest.raises(ConfigError) as caught:
        knob("key").check(7_777, spelling="key")
    assert "7777" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("switch", True, "on"),
        ("maybe", None, "auto"),
        ("some", (), "none"),
        ("some", ("x", "y"), "x,y"),
        ("count", 3, "3"),
    ],
)
def test_values_are_shown_as_an_operator_writes_them(name: str, value: Any, shown: str) -> None:
    assert knob(name).show(value) == shown


def test_a_refused_value_is_not_offered() -> None:
    assert knob("kind").expects.startswith("one of a, b ")


def test_every_word_for_a_value_is_named_where_one_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        knob("kind").parse("c++", spelling="--kind")
    assert caught.value.what == "--kind: 'c++' is not one of a, b (also alpha = a)"
    assert knob("kind").parse("ALPHA", spelling="--kind") == "a"


def test_the_only_value_is_no_range() -> None:
    with pytest.raises(ConfigError) as caught:
        knob("only").parse("4", spelling="--only")
    assert caught.value.what == "--only: 4 is not 1, the only value, or auto"


def test_a_switch_is_read_strictly() -> None:
    assert parse_switch("yes", spelling="X")
    with pytest.raises(ConfigError, match="X: 'perhaps'"):
        parse_switch("perhaps", spelling="X")


def test_a_setting_without_a_description_does_not_exist() -> None:
    @dataclass(frozen=True)
    class Bare:
        count: int = 3

    with pytest.raises(TypeError, match="count"):
        knobs(Bare)


def test_a_setting_has_a_default_and_a_known_type() -> None:
    @dataclass(frozen=True)
    class Undecided:
        count: Annotated[int, Knob("Counts")]

    @dataclass(frozen=True)
    class Strange:
        table: Annotated[dict[str, int], Knob("Maps")] = field(default_factory=dict)

    @dataclass(frozen=True)
    class Stranger:
        number: Annotated[complex, Knob("Turns")] = 1j

    for wrong in (Undecided, Strange, Stranger):
        with pytest.raises(TypeError):
            knobs(wrong)
