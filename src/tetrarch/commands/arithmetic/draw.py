# SPDX-License-Identifier: Apache-2.0
"""The dice of the problem generator, its word lists, and how a calculation is written out.

The demo checkpoint was trained on these very problems, so the order in which a template draws from
the random stream is part of the data: reordering two draws makes other problems, and lets training
problems leak into the test split.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "BOXES",
    "DAYS",
    "GOODS",
    "ITEMS",
    "NAMES",
    "PLACES",
    "Draw",
    "added",
    "capitalized",
    "divided",
    "multiplied",
    "plural",
    "subtracted",
]

T = TypeVar("T")
Person = tuple[str, str, str]  # name, pronoun, possessive

_SHE = ("Mia", "Ava", "Zoe", "Ines", "Lena", "Yuki", "Nora", "Ella", "Tara", "Rosa", "Anna", "Maya")
_HE = ("Noah", "Liam", "Omar", "Ravi", "Hugo", "Ben", "Kofi", "Ivan", "Paul", "Sam", "Leo", "Jack")
NAMES: tuple[Person, ...] = tuple(
    person
    for she, he in zip(_SHE, _HE, strict=True)
    for person in ((she, "she", "her"), (he, "he", "his"))
)
ITEMS = (
    *("apples", "pencils", "marbles", "stickers", "books", "cookies", "cards", "coins", "shells"),
    *("beads", "oranges", "stamps", "balloons", "muffins", "toys", "flowers", "buttons", "eggs"),
)
GOODS = (
    *("notebook", "pen", "sandwich", "ticket", "shirt", "toy car"),
    *("cake", "lamp", "mug", "hat", "ball", "poster"),
)
BOXES = ("boxes", "bags", "baskets", "jars", "trays", "packs")
PLACES = ("the market", "the store", "the fair", "school", "the park", "the library")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Draw:
    """A random stream whose numbers grow with the level: 0 tiny, 1 normal, 2 hard.

    Attributes:
        held_out: Set by a template whose operations are kept out of training.
    """

    def __init__(self, stream: random.Random, level: int) -> None:
        self.stream, self.level, self.held_out = stream, level, False

    def number(self, low: int, high: int) -> int:
        """Draw from `low` to `high`; level 0 spans ten numbers, level 2 twice the range."""
        top = (min(high, low + 9), high, high * 2)[self.level]
        return self.stream.randint(low, max(low, top))

    def small(self) -> int:
        """Draw a factor that a child multiplies by."""
        return self.stream.randint(2, (4, 9, 12)[self.level])

    def one(self, choices: Sequence[T]) -> T:
        """Draw one."""
        return self.stream.choice(choices)

    def some(self, choices: Sequence[T], count: int) -> list[T]:
        """Draw `count` different ones."""
        return self.stream.sample(choices, count)


def plural(good: str) -> str:
    """Return the plural of a word in `GOODS`."""
    return good + ("es" if good[-1] in "sx" else "s")


def capitalized(word: str) -> str:
    """Return the word with a capital first letter, the rest untouched."""
    return word[0].upper() + word[1:]


def added(*terms: int) -> str:
    """Write out a sum; more than two terms are added from the left, one equation a step."""
    lines = [
        " + ".join(map(str, (sum(terms[:done]), *terms[done:]))) for done in range(1, len(terms))
    ]
    return " = ".join((*lines, str(sum(terms))))


def subtracted(first: int, second: int) -> str:
    """Write out a difference."""
    return f"{first} - {second} = {first - second}"


def divided(first: int, second: int) -> str:
    """Write out a quotient without remainder."""
    return f"{first} / {second} = {first // second}"


def multiplied(first: int, second: int) -> str:
    """Write out a product; two-digit factors are split into tens and ones first."""
    if first >= 10 and second >= 10 and first % 10 and second % 10:
        tens, ones = second // 10 * 10, second % 10
        split = f"{first} * {tens} + {first} * {ones}"
        return f"{first} * {second} = {split} = {first * tens} + {first * ones} = {first * second}"
    return f"{first} * {second} = {first * second}"
