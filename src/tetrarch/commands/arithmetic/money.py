# SPDX-License-Identifier: Apache-2.0
"""Story templates about prices and wages."""

from __future__ import annotations

from tetrarch.commands.arithmetic.draw import (
    BOXES,
    GOODS,
    ITEMS,
    NAMES,
    Draw,
    added,
    capitalized,
    divided,
    multiplied,
    plural,
    subtracted,
)

__all__ = [
    "Story",
    "change",
    "cost_two",
    "pack_sell",
    "percent_off",
    "perimeter",
    "saving",
    "wages",
]

Story = tuple[str, list[str], int]  # question, solution steps, answer

_BILLS = (20, 50, 100, 200, 500)
_PARTS_OF_PERCENT = {10: 10, 20: 5, 25: 4, 50: 2}


def cost_two(draw: Draw) -> Story:
    """Two goods, two prices."""
    who, they, _ = draw.one(NAMES)
    first, second = draw.some(GOODS, 2)
    count, other = draw.small(), draw.small()
    price, other_price = draw.number(2, 15), draw.number(2, 15)
    firsts, seconds = plural(first), plural(second)
    question = draw.one(
        [
            f"{who} buys {count} {firsts} for ${price} each and {other} {seconds} for "
            f"${other_price} each. How much does {they} pay in total?",
            f"A {first} costs ${price} and a {second} costs ${other_price}. How many dollars does "
            f"{who} need for {count} {firsts} and {other} {seconds}?",
        ]
    )
    steps = [
        f"The {firsts} cost {multiplied(count, price)} dollars.",
        f"The {seconds} cost {multiplied(other, other_price)} dollars.",
        f"In total {added(count * price, other * other_price)} dollars.",
    ]
    return question, steps, count * price + other * other_price


def change(draw: Draw) -> Story:
    """Paying with a bill."""
    who, they, _ = draw.one(NAMES)
    good = draw.one(GOODS)
    count, price = draw.small(), draw.number(2, 12)
    total = count * price
    bill = next(bill for bill in _BILLS if bill > total)
    goods = plural(good)
    question = draw.one(
        [
            f"{who} buys {count} {goods} at ${price} each and pays with a ${bill} bill. "
            f"How much change does {they} get?",
            f"{who} has ${bill}. {capitalized(they)} spends it on {count} {goods} that cost "
            f"${price} each. How many dollars are left?",
        ]
    )
    steps = [
        f"The {goods} cost {multiplied(count, price)} dollars.",
        f"So {subtracted(bill, total)} dollars are left.",
    ]
    return question, steps, bill - total


def pack_sell(draw: Draw) -> Story:
    """Packing items and selling the packs."""
    who, they, _ = draw.one(NAMES)
    items, boxes = draw.one(ITEMS), draw.one(BOXES)
    size, packs, price = draw.small(), draw.number(3, 20), draw.small()
    total = size * packs
    question = draw.one(
        [
            f"{who} puts {total} {items} into {boxes} of {size} and sells each for ${price}. "
            f"How much money does {they} get?",
            f"{who} has {total} {items}. {capitalized(they)} packs {size} in each of the {boxes} "
            f"and sells them all at ${price} each. How many dollars does {who} earn?",
        ]
    )
    steps = [
        f"There are {divided(total, size)} {boxes}.",
        f"The money is {multiplied(packs, price)} dollars.",
    ]
    return question, steps, packs * price


def saving(draw: Draw) -> Story:
    """Weeks until a wish can be paid."""
    who, they, _ = draw.one(NAMES)
    good = draw.one(GOODS)
    have, weekly, weeks = draw.number(5, 40), draw.small(), draw.number(2, 12)
    price = have + weekly * weeks
    question = draw.one(
        [
            f"{who} wants a {good} that costs ${price}. {capitalized(they)} has ${have} and saves "
            f"${weekly} each week. How many weeks does {they} need to save?",
            f"A {good} costs ${price}. {who} already has ${have}. If {they} saves ${weekly} a "
            f"week, after how many weeks can {they} buy it?",
        ]
    )
    steps = [
        f"{capitalized(they)} needs {subtracted(price, have)} more dollars.",
        f"That takes {divided(price - have, weekly)} weeks.",
    ]
    return question, steps, weeks


def percent_off(draw: Draw) -> Story:
    """A discount that divides evenly."""
    who, they, _ = draw.one(NAMES)
    good = draw.one(GOODS)
    percent = draw.one([10, 20, 25, 50])
    saved = draw.number(2, 20)
    parts = _PARTS_OF_PERCENT[percent]
    price = saved * parts
    question = draw.one(
        [
            f"A {good} costs ${price}. {who} gets a {percent}% discount. How much does {they} pay?",
            f"{who} buys a {good} with {percent}% off. The old price was ${price}. "
            "What is the new price in dollars?",
        ]
    )
    steps = [
        f"{percent}% of {price} is {divided(price, parts)}.",
        f"So the price is {subtracted(price, saved)} dollars.",
    ]
    return question, steps, price - saved


def wages(draw: Draw) -> Story:
    """Hours, days and a bonus."""
    who, they, _ = draw.one(NAMES)
    hourly, hours, bonus = draw.number(6, 20), draw.small(), draw.number(5, 40)
    days = draw.one([2, 3, 4, 5])
    question = (
        f"{who} earns ${hourly} an hour and works {hours} hours a day for {days} days. "
        f"{capitalized(they)} also gets a bonus of ${bonus}. How much does {they} earn in total?"
    )
    daily = hourly * hours
    steps = [
        f"In one day {they} earns {multiplied(hourly, hours)} dollars.",
        f"In {days} days {they} earns {multiplied(daily, days)} dollars.",
        f"With the bonus {added(daily * days, bonus)} dollars.",
    ]
    return question, steps, daily * days + bonus


def perimeter(draw: Draw) -> Story:
    """A fence around a garden."""
    length, width, price = draw.number(3, 30), draw.number(3, 30), draw.small()
    question = draw.one(
        [
            f"A garden is {length} meters long and {width} meters wide. A fence costs ${price} "
            "per meter. How much does a fence around the garden cost?"
        ]
    )
    steps = [
        f"One long and one wide side are {added(length, width)} meters.",
        f"The whole fence is {multiplied(length + width, 2)} meters.",
        f"It costs {multiplied(2 * (length + width), price)} dollars.",
    ]
    return question, steps, 2 * (length + width) * price
