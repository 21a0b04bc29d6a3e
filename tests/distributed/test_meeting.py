# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tetrarch.core.errors import RequestError
from tetrarch.distributed.meeting import Meeting

CPU = torch.device("cpu")
GOOD = Meeting("127.0.0.1", 1234, rank=1, world_size=2, name="weights", backend="gloo")


def test_a_trainer_and_a_server_may_meet() -> None:
    GOOD.check(CPU)
    replace(GOOD, rank=7, world_size=8).check(CPU)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"world_size": 1}, "world_size"),
        ({"rank": 0}, "rank_offset"),
        ({"rank": 2}, "rank_offset"),
        ({"rank": -1}, "rank_offset"),
        ({"port": 0}, "master_port"),
        ({"port": 65536}, "master_port"),
        ({"address": ""}, "master_address"),
        ({"name": ""}, "group_name"),
        ({"backend": "mpi"}, "backend"),
        ({"backend": "nccl"}, "backend"),
    ],
)
def test_a_meeting_that_cannot_be_says_which_field(wrong: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as error:
        replace(GOOD, **wrong).check(CPU)
    assert error.value.param == param


def test_the_error_names_the_group_shortly() -> None:
    error = replace(GOOD, name="x" * 10_000).error("why", fix="fix")
    assert len(str(error)) < 200
