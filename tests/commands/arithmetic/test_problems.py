# SPDX-License-Identifier: Apache-2.0
"""The problem stream is data: it must never change under a trained checkpoint."""

from __future__ import annotations

import hashlib
import re
from itertools import islice

import pytest

from tetrarch.commands.arithmetic.problems import Problem, Split, answer_of, eval_split, problem

# First 100 problems of each split, as the generator that trained the checkpoint made them.
DIGESTS = {
    Split.TRAIN: "7547f6b9270465c3",
    Split.TEST: "139c0def4a41e88d",
    Split.COMP: "59a3fb839d1d3652",
    Split.HARD: "c4e0db2616576eef",
}
EQUATION = re.compile(r"\d[\d+\-*/ ]*(?:= [\d+\-*/ ]*)+")


def _text(item: Problem) -> str:
    return f"{item.question}\n{item.solution}"


@pytest.mark.parametrize("split", Split)
def test_a_split_is_the_one_the_checkpoint_never_saw(split: Split) -> None:
    text = "\n".join(_text(item) for item in islice(eval_split(split), 100))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[split]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_equation_of_a_solution_is_true(level: int) -> None:
    equations = 0
    for index in range(1000):
        item = problem(index, seed=1, level=level)
        for line in item.solution.splitlines()[:-1]:
            for equation in EQUATION.findall(line):
                sides = {eval(side) for side in equation.split("=")}
                assert len(sides) == 1, line
                equations += 1
    assert equations > 2000


def test_the_same_index_is_the_same_problem_and_another_seed_is_not() -> None:
    first = [problem(index, seed=5) for index in range(50)]
    assert first == [problem(index, seed=5) for index in range(50)]
    assert first != [problem(index, seed=6) for index in range(50)]


@pytest.mark.parametrize("split", [Split.TEST, Split.COMP, Split.HARD])
def test_no_evaluated_question_is_a_training_question(split: Split) -> None:
    seen = (problem(index, seed=1, level=1 + index % 2) for index in range(4000))
    trained = {item.question for item in seen if item.split is Split.TRAIN}
    assert len(trained) > 2000
    assert not trained & {item.question for item in islice(eval_split(split), 60)}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First 1 + 1 = 2.\n#### 2", 2),
        ("#### 1\n#### 20 ", 20),
        ("#### -3", -3),
        ("no answer", None),
        ("#### seven", None),
        ("", None),
    ],
)
def test_the_answer_stands_behind_the_last_mark(text: str, answer: int | None) -> None:
    assert answer_of(text) == answer


def test_the_answer_of_every_solution_is_its_answer() -> None:
    for index in range(500):
        item = problem(index, seed=3, level=2)
        assert answer_of(item.solution) == item.answer
