# SPDX-License-Identifier: Apache-2.0
"""What trainers ask arrives as it left, and its defaults are those that trainers rely on."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tetrarch.engine import actions
from tetrarch.engine.messages import decode_inbound, encode

FIELDS: dict[str, dict[str, object]] = {
    "SetVersion": {"version": "v"},
    "UpdateFromDisk": {"path": "/models/new", "weight_version": "7", "atomic": False},
    "UpdateFromTensors": {"data": bytes(range(256)), "load_format": "flattened_bucket"},
    "InitGroup": {
        "master_address": "::1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": 9,
    },
    "UpdateFromDistributed": {
        "names": ("a", "b"),
        "dtypes": ("bfloat16", "float32"),
        "shapes": ((2, 3), ()),
    },
    "GetWeights": {"name": "lm_head.weight"},
    "CheckWeights": {"action": "compare", "skip": ("a",)},
    "Release": {"tags": ("weights",), "wait_s": 2.5, "backup": True},
}


@pytest.mark.parametrize("kind", get_args(actions.Action), ids=lambda kind: kind.__name__)
def test_every_action_arrives_as_it_left(kind: type[msgspec.Struct]) -> None:
    message = kind(ticket=5, **FIELDS.get(kind.__name__, {}))
    assert decode_inbound(encode(message)) == message


def test_defaults_are_those_that_trainers_rely_on() -> None:
    disk = actions.UpdateFromDisk(ticket=1, path="x")
    assert (disk.flush_cache, disk.abort_all_requests, disk.keep_pause) == (True, False, False)
    assert (disk.weight_version, disk.atomic, disk.dry_run) == (None, None, False)
    assert actions.UpdateFromTensors(ticket=1, data=b"").flush_cache
    assert actions.Pause(ticket=1).mode == "abort"
    assert actions.SetVersion(ticket=1, version="x").abort_all_requests
    assert actions.GetWeights(ticket=1, name="x").truncate_size == 100
    group = "weight_update_group"
    assert actions.DestroyGroup(ticket=1).group_name == group
    distributed = actions.UpdateFromDistributed(ticket=1, names=(), dtypes=(), shapes=())
    assert (distributed.group_name, distributed.flush_cache) == (group, True)


@pytest.mark.parametrize("field", [{"mode": "sideways"}, {"mode": None}, {"ticket": "x"}])
def test_values_of_other_types_are_no_messages(field: dict[str, object]) -> None:
    wrong = msgspec.msgpack.encode({"type": "Pause", "ticket": 1, **field})
    with pytest.raises(msgspec.ValidationError):
        decode_inbound(wrong)
