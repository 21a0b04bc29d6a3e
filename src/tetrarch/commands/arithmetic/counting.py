# SPDX-License-Identifier: Apache-2.0
"""Story templates about things, ages, distances and animals."""

from __future__ import annotations

from tetrarch.commands.arithmetic.draw import (
    DAYS,
    ITEMS,
    NAMES,
    PLACES,
    Draw,
    added,
    capitalized,
    divided,
    multiplied,
    subtracted,
)
from tetrarch.commands.arithmetic.money import Story

__all__ = [
    "age",
    "average",
    "buy_give",
    "half_next",
    "legs",
    "more_less",
    "pages",
    "recipe",
    "rows",
    "share_equal",
    "times_as_many",
    "trip",
]

_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
_ANIMALS = [("chickens", "cows"), ("ducks", "horses"), ("birds", "dogs"), ("hens", "sheep")]


def buy_give(draw: Draw) -> Story:
    """Some more, then some fewer."""
    (who, they, _), (friend, _, _) = draw.some(NAMES, 2)
    items = draw.one(ITEMS)
    have, more = draw.number(5, 60), draw.number(2, 40)
    fewer = min(draw.number(1, min(30, have + more - 1)), have + more - 1)
    question = draw.one(
        [
            f"{who} has {have} {items}. {capitalized(they)} buys {more} more at "
            f"{draw.one(PLACES)} and gives {fewer} to {friend}. How many {items} does {who} have "
            "now?",
            f"{who} had {have} {items} and found {more} more. Then {they} gave {fewer} of them to "
            f"{friend}. How many {items} are left?",
            f"There are {have} {items} on {who}'s table. {friend} puts {more} more on it, and "
            f"{who} takes {fewer} away. How many {items} are on the table?",
        ]
    )
    steps = [
        f"First {added(have, more)} {items}.",
        f"Then {subtracted(have + more, fewer)} {items}.",
    ]
    return question, steps, have + more - fewer


def times_as_many(draw: Draw) -> Story:
    """A multiple, and both together."""
    (who, _, _), (friend, _, _) = draw.some(NAMES, 2)
    items = draw.one(ITEMS)
    have, times = draw.number(3, 30), draw.one([2, 3, 4, 5])
    question = draw.one(
        [
            f"{who} has {have} {items}. {friend} has {_TIMES[times]} as many. "
            f"How many {items} do they have together?",
            f"{friend} collected {_TIMES[times]} as many {items} as {who}. If {who} collected "
            f"{have}, how many {items} did they collect altogether?",
        ]
    )
    steps = [
        f"{friend} has {multiplied(have, times)} {items}.",
        f"Together {added(have, have * times)} {items}.",
    ]
    return question, steps, have + have * times


def half_next(draw: Draw) -> Story:
    """Half as many on the next day."""
    who, they, _ = draw.one(NAMES)
    items = draw.one(ITEMS)
    first, second = draw.some(DAYS, 2)
    half = draw.number(3, 40)
    whole = 2 * half
    question = draw.one(
        [
            f"{who} sold {whole} {items} on {first} and half as many on {second}. "
            f"How many {items} did {they} sell in all?",
            f"On {first} {who} made {whole} {items}. On {second} {they} made half as many. "
            f"How many {items} did {who} make on both days?",
        ]
    )
    steps = [
        f"On {second} the number was {divided(whole, 2)}.",
        f"In all {added(whole, half)} {items}.",
    ]
    return question, steps, whole + half


def pages(draw: Draw) -> Story:
    """What is left of a book."""
    who, they, _ = draw.one(NAMES)
    days, daily = draw.small(), draw.number(5, 30)
    rest = draw.number(3, 60)
    book = days * daily + rest
    question = draw.one(
        [
            f"A book has {book} pages. {who} reads {daily} pages a day for {days} days. "
            "How many pages are left to read?",
            f"{who} reads {daily} pages every day. After {days} days, how many pages of a {book} "
            f"page book has {they} not read yet?",
        ]
    )
    steps = [
        f"{who} reads {multiplied(daily, days)} pages.",
        f"There are {subtracted(book, days * daily)} pages left.",
    ]
    return question, steps, rest


def age(draw: Draw) -> Story:
    """Older now, older later."""
    (who, they, _), (friend, _, _) = draw.some(NAMES, 2)
    years, older, later = draw.number(4, 30), draw.number(2, 20), draw.number(2, 15)
    question = draw.one(
        [
            f"{friend} is {years} years old. {who} is {older} years older than {friend}. "
            f"How old will {who} be in {later} years?",
            f"{who} is {older} years older than {friend}, who is {years}. "
            f"What will be the age of {who} {later} years from now?",
        ]
    )
    steps = [
        f"{who} is {added(years, older)} years old now.",
        f"In {later} years {they} will be {added(years + older, later)}.",
    ]
    return question, steps, years + older + later


def trip(draw: Draw) -> Story:
    """Two speeds, two times."""
    who, they, _ = draw.one(NAMES)
    hours, then_hours = draw.small(), draw.small()
    speed, then_speed = draw.number(3, 40), draw.number(3, 40)
    moves = draw.one(["drives", "rides", "travels"])
    question = (
        f"{who} {moves} at {speed} miles per hour for {hours} hours and then at {then_speed} "
        f"miles per hour for {then_hours} hours. How many miles does {they} go?"
    )
    first, second = speed * hours, then_speed * then_hours
    steps = [
        f"The first part is {multiplied(speed, hours)} miles.",
        f"The second part is {multiplied(then_speed, then_hours)} miles.",
        f"The whole trip is {added(first, second)} miles.",
    ]
    return question, steps, first + second


def rows(draw: Draw) -> Story:
    """A rectangle with some taken away."""
    things = draw.one(["chairs", "desks", "trees", "plants", "cars"])
    count, each = draw.small(), draw.number(3, 20)
    total = count * each
    gone = min(draw.number(1, min(20, total - 1)), total - 1)
    question = draw.one(
        [
            f"There are {count} rows of {each} {things}. {gone} of the {things} are removed. "
            f"How many {things} remain?",
            f"A field has {count} rows with {each} {things} in each row. If {gone} {things} are "
            "taken away, how many are there?",
        ]
    )
    steps = [
        f"There were {multiplied(count, each)} {things}.",
        f"Now there are {subtracted(total, gone)} {things}.",
    ]
    return question, steps, total - gone


def average(draw: Draw) -> Story:
    """Three games whose mean is whole."""
    who, _, their = draw.one(NAMES)
    first, second = draw.number(3, 40), draw.number(3, 40)
    mean = (first + second) // 3 + draw.small()
    third = 3 * mean - first - second
    if third <= 0:
        mean += (3 - third) // 3 + 1
        third = 3 * mean - first - second
    question = (
        f"{who} scores {first}, {second} and {third} points in three games. "
        f"What is {their} average score?"
    )
    steps = [
        f"The sum is {added(first, second, third)}.",
        f"The average is {divided(first + second + third, 3)}.",
    ]
    return question, steps, mean


def legs(draw: Draw) -> Story:
    """Two legs and four."""
    birds, beasts = draw.number(2, 20), draw.number(2, 20)
    two, four = draw.one(_ANIMALS)
    question = draw.one(
        [
            f"A farm has {birds} {two} and {beasts} {four}. How many legs are there in total?",
            f"How many legs do {birds} {two} and {beasts} {four} have altogether?",
        ]
    )
    steps = [
        f"The {two} have {multiplied(birds, 2)} legs.",
        f"The {four} have {multiplied(beasts, 4)} legs.",
        f"In total {added(birds * 2, beasts * 4)} legs.",
    ]
    return question, steps, birds * 2 + beasts * 4


def recipe(draw: Draw) -> Story:
    """Eggs for more cakes."""
    who, they, _ = draw.one(NAMES)
    cakes, eggs, times = draw.small(), draw.small(), draw.one([2, 3, 4, 5])
    question = (
        f"{who} uses {eggs} eggs for {cakes} cakes. {capitalized(they)} wants to bake "
        f"{cakes * times} cakes. How many eggs does {they} need?"
    )
    steps = [
        f"That is {divided(cakes * times, cakes)} times as many cakes.",
        f"So {they} needs {multiplied(eggs, times)} eggs.",
    ]
    return question, steps, eggs * times


def share_equal(draw: Draw) -> Story:
    """Two heaps, equal shares."""
    (who, _, _), (friend, _, _) = draw.some(NAMES, 2)
    items = draw.one(ITEMS)
    children, each = draw.small(), draw.number(2, 15)
    total = children * each
    mine = min(draw.number(1, max(1, total - 1)), total - 1)
    question = draw.one(
        [
            f"{who} has {mine} {items} and {friend} has {total - mine}. They share them equally "
            f"among {children} children. How many {items} does each child get?"
        ]
    )
    steps = [
        f"Together {added(mine, total - mine)} {items}.",
        f"Each child gets {divided(total, children)} {items}.",
    ]
    return question, steps, each


def more_less(draw: Draw) -> Story:
    """Three people, two comparisons."""
    (who, _, _), (richer, _, _), (poorer, _, _) = draw.some(NAMES, 3)
    items = draw.one(ITEMS)
    have, more = draw.number(8, 50), draw.number(2, 20)
    fewer = min(draw.number(1, have - 1), have - 1)
    question = (
        f"{who} has {have} {items}. {richer} has {more} more than {who}, and {poorer} has {fewer} "
        f"fewer than {who}. How many {items} do {richer} and {poorer} have together?"
    )
    steps = [
        f"{richer} has {added(have, more)} {items}.",
        f"{poorer} has {subtracted(have, fewer)} {items}.",
        f"Together {added(have + more, have - fewer)} {items}.",
    ]
    return question, steps, 2 * have + more - fewer
