# SPDX-License-Identifier: Apache-2.0
"""Problem number `index` of a seed is always the same problem; so no data set is stored."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tetrarch.commands.arithmetic import chain, counting, money
from tetrarch.commands.arithmetic.draw import Draw

__all__ = ["EVAL_SEED", "Problem", "Split", "answer_of", "eval_split", "problem"]

EVAL_SEED = 99  # training used seed 1
_INDEX_MASK = (1 << 40) - 1  # keeps the scrambled index below the seed bits

_Template = Callable[[Draw], money.Story]
# Order and weight fix the draws, and with them every problem.
_TEMPLATES: tuple[tuple[_Template, int], ...] = (
    (counting.buy_give, 1),
    (money.cost_two, 1),
    (money.change, 1),
    (counting.times_as_many, 1),
    (counting.half_next, 1),
    (counting.pages, 1),
    (money.pack_sell, 1),
    (money.saving, 1),
    (counting.age, 1),
    (counting.trip, 1),
    (counting.rows, 1),
    (money.percent_off, 1),
    (counting.average, 1),
    (money.wages, 1),
    (counting.legs, 1),
    (counting.recipe, 1),
    (money.perimeter, 1),
    (counting.share_equal, 1),
    (counting.more_less, 1),
    (chain.chain, 4),
    (chain.drill, 2),
)
_SMALL_TALK = (
    ("Hello!", "Hello! Give me a word problem with numbers and I will solve it step by step."),
    (
        "Who are you?",
        "I am a tiny mixture-of-experts demo model. I solve short word problems with numbers.",
    ),
    (
        "What can you do?",
        "I can add, subtract, multiply and divide, and solve short word problems step by step.",
    ),
    ("Thanks!", "You are welcome. Do you have another problem?"),
    ("Good morning.", "Good morning! Give me a word problem with numbers."),
)
_SMALL_TALK_SHARE = 0.01
_TEST_SHARE = 50  # one question in fifty, by its checksum, is never trained on


class Split(StrEnum):
    """Which problems: only `train` was ever trained on."""

    TRAIN = "train"
    TEST = "test"  # unseen questions
    COMP = "comp"  # unseen sequences of operations
    HARD = "hard"  # unseen questions with larger numbers and longer chains


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its worked solution; `answer` is `None` for small talk."""

    question: str
    solution: str
    answer: int | None
    template: str
    split: Split


def problem(index: int, *, seed: int, level: int = 1, chain_only: bool = False) -> Problem:
    """Return problem `index` of a seed.

    Args:
        index: Any non-negative number.
        seed: Names the stream.
        level: Size of the numbers: 0 tiny, 1 normal, 2 hard.
        chain_only: Only chains of operations, as in the `comp` split.
    """
    stream = random.Random((seed << 40) ^ (index * 2654435761 & _INDEX_MASK) ^ level)
    draw = Draw(stream, level)
    if stream.random() < _SMALL_TALK_SHARE and not chain_only:
        question, solution = stream.choice(_SMALL_TALK)
        return Problem(question, solution, None, "small_talk", Split.TRAIN)
    if chain_only:
        template = stream.choice([chain.chain])
    else:
        templates, weights = zip(*_TEMPLATES, strict=True)
        template = stream.choices(templates, weights)[0]
    question, steps, answer = template(draw)
    solution = "\n".join((*steps, f"#### {answer}"))
    return Problem(question, solution, answer, template.__name__, _split_of(draw, question))


def _split_of(draw: Draw, question: str) -> Split:
    if draw.held_out:
        return Split.COMP
    return Split.TEST if zlib.crc32(question.encode()) % _TEST_SHARE == 0 else Split.TRAIN


def eval_split(split: Split, *, seed: int = EVAL_SEED) -> Iterator[Problem]:
    """Yield the problems of a split without end, always in the same order."""
    level = 2 if split is Split.HARD else 1
    stored_as = Split.TEST if split is Split.HARD else split
    index = 0
    while True:
        candidate = problem(index, seed=seed, level=level, chain_only=split is Split.COMP)
        if candidate.split is stored_as:
            yield candidate
        index += 1


def answer_of(text: str) -> int | None:
    """Return the number behind the last `####`, or `None` where there is none."""
    _, mark, tail = text.rpartition("####")
    digits = tail.strip()
    return int(digits) if mark and digits.lstrip("-").isdigit() else None
