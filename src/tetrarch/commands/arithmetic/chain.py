# SPDX-License-Identifier: Apache-2.0
"""Templates that string operations together, and bare calculations."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from tetrarch.commands.arithmetic.draw import (
    ITEMS,
    NAMES,
    Draw,
    added,
    capitalized,
    divided,
    multiplied,
    subtracted,
)
from tetrarch.commands.arithmetic.money import Story

__all__ = ["chain", "drill"]

_OPERATIONS = ("gets", "loses", "doubles", "halves", "triples", "shares")
_MOST_STEPS = (3, 5, 7)  # by level
_MOST_LOST = (9, 60, 200)
_PARTS = (3, 4, 5, 6, 7, 8)
_HELD_OUT_SHARE = 8  # one operation triple in eight never occurs in training


def chain(draw: Draw) -> Story:
    """A story of three to seven operations on one number."""
    who, they, _ = draw.one(NAMES)
    items = draw.one(ITEMS)
    count = draw.number(4, 40)
    length = draw.stream.randint(3, _MOST_STEPS[draw.level])
    sentences, steps, done = [f"{who} starts with {count} {items}."], list[str](), list[str]()
    for index in range(length):
        operation = _possible(draw.one(_OPERATIONS), count)
        done.append(operation)
        sentence, step, count = _APPLY[operation](draw, capitalized(they), count)
        sentences.append(sentence)
        steps.append(f"Step {index + 1}: {step}.")
    draw.held_out = any(_is_held_out(done[at : at + 3]) for at in range(len(done) - 2))
    question = f"{' '.join(sentences)} How many {items} does {who} have at the end?"
    return question, steps, count


def _possible(operation: str, count: int) -> str:
    """Replace an operation that the number does not allow, or that makes it too large."""
    if (operation == "doubles" and count > 200) or (operation == "triples" and count > 120):
        operation = "loses"
    if operation == "halves" and (count % 2 or count < 4):
        operation = "gets"
    if operation == "shares" and not _divisors(count):
        operation = "gets"
    if operation == "loses" and count < 4:
        operation = "gets"
    return operation


def _divisors(count: int) -> list[int]:
    return [part for part in _PARTS if count % part == 0 and count // part > 1]


def _is_held_out(operations: list[str]) -> bool:
    return zlib.crc32("/".join(operations).encode()) % _HELD_OUT_SHARE == 0


def _gets(draw: Draw, they: str, count: int) -> tuple[str, str, int]:
    more = draw.number(2, 40)
    sentence = draw.one([f"{they} gets {more} more.", f"{they} finds {more} more."])
    return sentence, added(count, more), count + more


def _loses(draw: Draw, they: str, count: int) -> tuple[str, str, int]:
    fewer = draw.stream.randint(1, min(count - 1, _MOST_LOST[draw.level]))
    sentence = draw.one([f"{they} loses {fewer}.", f"{they} gives away {fewer}."])
    return sentence, subtracted(count, fewer), count - fewer


def _doubles(_draw: Draw, _they: str, count: int) -> tuple[str, str, int]:
    return "Then the number doubles.", multiplied(count, 2), count * 2


def _triples(_draw: Draw, _they: str, count: int) -> tuple[str, str, int]:
    return "Then the number triples.", multiplied(count, 3), count * 3


def _halves(_draw: Draw, they: str, count: int) -> tuple[str, str, int]:
    return f"{they} gives away half.", divided(count, 2), count // 2


def _shares(draw: Draw, they: str, count: int) -> tuple[str, str, int]:
    parts = draw.one(_divisors(count))
    sentence = f"{they} splits them into {parts} equal parts and keeps one part."
    return sentence, divided(count, parts), count // parts


_APPLY: dict[str, Callable[[Draw, str, int], tuple[str, str, int]]] = {
    "gets": _gets,
    "loses": _loses,
    "doubles": _doubles,
    "halves": _halves,
    "triples": _triples,
    "shares": _shares,
}


def drill(draw: Draw) -> Story:
    """A bare calculation."""
    sign = draw.one("+-*/")
    first = draw.number(2, (20, 300, 900)[draw.level])
    second = draw.number(2, (20, 200, 900)[draw.level])
    if sign == "-":
        first, second = max(first, second), min(first, second)
    elif sign == "*":
        first, second = draw.number(2, 60), draw.number(2, 20)
    elif sign == "/":
        second = draw.stream.randint(2, 9)
        first = second * draw.number(2, 60)
    step, answer = {
        "+": (added(first, second), first + second),
        "-": (subtracted(first, second), first - second),
        "*": (multiplied(first, second), first * second),
        "/": (divided(first, second), first // second),
    }[sign]
    question = draw.one([f"What is {first} {sign} {second}?", f"Compute {first} {sign} {second}."])
    return question, [f"{step}."], answer
