# SPDX-License-Identifier: Apache-2.0
"""Every template of `chain` ends in the answer its last step computes."""

from __future__ import annotations

import random
import re

import pytest

from tetrarch.commands.arithmetic import chain
from tetrarch.commands.arithmetic.draw import Draw

TEMPLATES = [vars(chain)[name] for name in chain.__all__ if name[0].islower()]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_last_step_computes_the_answer(template, level: int) -> None:  # noqa: ANN001
    for seed in range(200):
        question, steps, answer = template(Draw(random.Random(seed), level))
        assert int(re.findall(r"\d+", steps[-1])[-1]) == answer
        assert question.rstrip()[-1] in "?."
