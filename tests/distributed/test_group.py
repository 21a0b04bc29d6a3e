# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.distributed import group
from tetrarch.distributed.group import WeightGroup
from tetrarch.distributed.lifeline import Lifeline
from tetrarch.distributed.meeting import Meeting

if TYPE_CHECKING:
    from conftest import Joined, Trainer

CPU = torch.device("cpu")
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def check_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.float(), expected.float())


def test_several_broadcasts_arrive_as_they_were_sent(weights: Joined) -> None:
    weights.send(
        "numbers(torch.float32, 2, 3), numbers(torch.bfloat16, 5), numbers(torch.uint8, 4),"
        " numbers(torch.float32, 0, 3), numbers(torch.float32)"
    )
    got = weights.receive(
        *[("float32", [2, 3]), ("bfloat16", [5]), ("uint8", [4])],
        *[("float32", [0, 3]), ("float32", [])],
    )
    assert weights.sent()
    check_same(got[0], numbers(torch.float32, 2, 3))
    check_same(got[1], numbers(torch.bfloat16, 5))
    check_same(got[2], numbers(torch.uint8, 4))
    check_same(got[3], torch.empty(0, 3))
    check_same(got[4], torch.tensor(0.0))


def test_every_dtype_arrives_bit_by_bit(weights: Joined) -> None:
    """Trainers send FP8 as bytes, for gloo knows none; the same is done here for all."""
    pattern = torch.arange(1, 49, dtype=torch.uint8)
    weights.send(f"*[torch.arange(1, 49, dtype=torch.uint8)] * {len(DTYPES)}")
    sizes = [getattr(torch, dtype).itemsize for dtype in DTYPES]
    got = weights.receive(*[(t, [48 // size]) for t, size in zip(DTYPES, sizes, strict=True)])
    assert weights.sent()
    for dtype, tensor in zip(DTYPES, got, strict=True):
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor.view(torch.uint8), pattern)


def test_many_tensors_small_and_large_arrive_in_order(weights: Joined) -> None:
    sizes = [1, 7, 300_000, 64, 2, 600_000, 3] + [5] * 2500 + [400_000, 9]
    weights.send(f"*[torch.full((n,), float(i % 100)) for i, n in enumerate({sizes})]")
    got = weights.receive(*[("float32", [size]) for size in sizes])
    assert weights.sent()
    for index, (size, tensor) in enumerate(zip(sizes, got, strict=True)):
        assert torch.equal(tensor, torch.full((size,), float(index % 100)))


def test_a_bucket_arrives_in_one_broadcast(weights: Joined) -> None:
    weights.send(
        "torch.cat([t.flatten().view(torch.uint8) for t in"
        " (numbers(torch.float32, 3), numbers(torch.bfloat16, 2, 2))])"
    )
    got = weights.receive(
        ("float32", [3]), ("bfloat16", [2, 2]), ("uint8", [0]), load_format="flattened_bucket"
    )
    assert weights.sent()
    check_same(got[0], numbers(torch.float32, 3))
    check_same(got[1], numbers(torch.bfloat16, 2, 2))


def test_a_bad_announcement_leaves_the_group_whole(weights: Joined) -> None:
    for dtype, shape, load_format in (
        ("no_dtype", [1], None),
        ("uint8", [-1], None),
        ("uint8", [2**60], None),
        ("uint8", [1], "os.system"),
    ):
        with pytest.raises(RequestError):
            weights.receive((dtype, shape), load_format=load_format)
    weights.send("numbers(torch.uint8, 2)")
    check_same(weights.receive(("uint8", [2]))[0], numbers(torch.uint8, 2))
    assert weights.sent()


def test_groups_live_side_by_side_without_a_default_group(
    weights: Joined, join: Callable[[str], Joined]
) -> None:
    other = join("other")
    other.send("numbers(torch.int32, 2)")
    weights.send("numbers(torch.int64, 3)")
    check_same(other.receive(("int32", [2]))[0], numbers(torch.int32, 2))
    check_same(weights.receive(("int64", [3]))[0], numbers(torch.int64, 3))
    assert other.sent()
    assert weights.sent()
    assert not torch.distributed.is_initialized()


def test_a_name_is_free_again_after_closing(join: Callable[[str], Joined]) -> None:
    first = join("again")
    first.leave()
    first.group.close()
    with pytest.raises(RequestError, match="closed"):
        first.receive(("uint8", [1]))
    second = join("again")
    second.send("numbers(torch.uint8, 2)")
    check_same(second.receive(("uint8", [2]))[0], numbers(torch.uint8, 2))
    assert second.sent()


@pytest.mark.parametrize(
    ("sent", "announced", "load_format"),
    [
        ("numbers(torch.float32, 7)", "float32", "flattened_bucket"),
        ("numbers(torch.bfloat16, 7)", "bfloat16", None),
        ("torch.zeros(0, dtype=torch.uint8)", "uint8", None),
    ],
)
def test_a_tensor_shorter_than_announced_is_an_error_and_no_garbage(
    join: Callable[[str], Joined], sent: str, announced: str, load_format: str | None
) -> None:
    """By a single number, where numbers have a NaN; by eight bytes where they have none."""
    short = join("short")
    short.send(sent)
    with pytest.raises(RequestError, match="shorter than announced"):
        short.receive((announced, [8]), load_format=load_format)
    assert short.sent()
    with pytest.raises(RequestError, match="an earlier broadcast failed"):
        short.receive(("float32", [4]))


@pytest.mark.parametrize(
    ("sent", "announced", "load_format"),
    [
        ("torch.ones(5000)", [("float32", [1000])], None),
        ("torch.ones(5)", [("float32", [2]), ("float32", [2])], "flattened_bucket"),
        ("torch.ones(300), torch.ones(200)", [("float32", [200]), ("float32", [300])], None),
    ],
)
def test_more_bytes_than_announced_end_the_group_and_nothing_else(
    join: Callable[[str], Joined],
    gone: Callable[..., bool],
    sent: str,
    announced: list[tuple[str, list[int]]],
    load_format: str | None,
) -> None:
    """gloo ends the process that receives them."""
    long = join("long")
    long.send(sent)
    with pytest.raises(RequestError, match="more bytes came than were announced") as error:
        long.receive(*announced, load_format=load_format)
    assert "/init_weights_update_group again" in error.value.fix
    assert not long.group.is_open
    assert gone(long.receiver)
    long.sent()  # or not: a trainer's call may fail, or wait for its own timeout


def test_a_silent_trainer_breaks_the_group_in_time(join: Callable[[str], Joined]) -> None:
    silent = join("silent")
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"did not send it all in 0\.5 s"):
        silent.receive(("uint8", [2]), timeout=0.5)
    assert not silent.group.is_open
    with pytest.raises(RequestError, match="broadcast failed"):
        silent.receive(("uint8", [2]))
    assert time.monotonic() - began < 5


def test_a_trainer_killed_mid_broadcast_is_an_error(own_trainer: Trainer, meeting: Meeting) -> None:
    own_trainer.tell(f"open_group('weights', {meeting.port})")
    weights = WeightGroup(meeting, CPU)
    weights.join(20)
    assert own_trainer.answer() == "done"
    own_trainer.tell("import os; send('weights', torch.ones(4)); os.kill(os.getpid(), 9)")
    began = time.monotonic()
    with pytest.raises(RequestError, match="trainer died"):
        weights.receive(["a", "b"], ["float32"] * 2, [[4], [1 << 20]], load_format=None, timeout=15)
    assert time.monotonic() - began < 10
    assert not weights.is_open


def test_closing_ends_a_receipt_and_says_who_closed(join: Callable[[str], Joined]) -> None:
    silent, began = join("destroyed"), time.monotonic()
    threading.Timer(0.5, silent.group.close).start()
    with pytest.raises(RequestError, match="it was destroyed while it was receiving") as refused:
        silent.receive(("uint8", [2]), timeout=60)
    assert "died" not in str(refused.value)
    assert time.monotonic() - began < 10


def test_a_wrong_world_size_times_out(trainer: Trainer, meeting: Meeting) -> None:
    trainer.tell(f"open_group('weights', {meeting.port}, world_size=2, timeout=4.0)")
    with pytest.raises(RequestError, match="did not come within 2 s"):
        WeightGroup(replace(meeting, world_size=3), CPU).join(2)
    assert trainer.answer()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"world_size": 1}, "world_size"),
        ({"address": "no.such.host.invalid"}, "master_address"),
        ({"address": "x" * 300}, "master_address"),
        ({"address": "nul\0"}, "master_address"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused_at_once(
    meeting: Meeting, wrong: dict[str, object], param: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError) as error:
        WeightGroup(replace(meeting, **wrong), CPU).join(20)
    assert error.value.param == param
    assert time.monotonic() - began < 5


def test_a_trainer_that_never_opens_is_not_waited_for(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_OPENS_WITHIN", 0.2)
    with pytest.raises(RequestError, match="nothing can be reached"):
        WeightGroup(meeting, CPU).join(60)


def test_a_port_that_is_no_store_is_an_error_in_time(
    meeting: Meeting, receivers_of: Callable[..., list[object]]
) -> None:
    before = receivers_of()
    with socket.create_server(("127.0.0.1", 0)) as dumb:
        place = replace(meeting, port=dumb.getsockname()[1])
        with pytest.raises(RequestError, match="did not come within 1 s"):
            WeightGroup(place, CPU).join(1)
    assert receivers_of() == before


def try_to_join(place: Meeting) -> tuple[WeightGroup, RequestError]:
    """Return how a group could not be joined, although there is a minute for it."""
    made, began = WeightGroup(place, CPU), time.monotonic()
    threading.Timer(1.0, made.close).start()
    with pytest.raises(RequestError) as refused:
        made.join(60)
    assert 0.9 < time.monotonic() - began < 10
    return made, refused.value


def test_closing_ends_a_join_whose_store_has_not_opened(meeting: Meeting) -> None:
    made, refused = try_to_join(meeting)
    assert "it was destroyed while it was being joined" in refused.why
    assert not made.is_open
    with pytest.raises(RequestError, match="destroyed while"):
        made.join(60)


def test_closing_ends_a_join_whose_others_do_not_come(
    meeting: Meeting, receivers_of: Callable[..., list[object]]
) -> None:
    before = receivers_of()
    with socket.create_server((meeting.address, meeting.port)):
        _, refused = try_to_join(meeting)
        assert "it was destroyed while it was being joined" in refused.why
        assert receivers_of() == before


@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_a_trainer_that_dies_while_others_are_awaited_is_not_waited_for(
    own_trainer: Trainer,
    meeting: Meeting,
    receivers_of: Callable[..., list[object]],
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
) -> None:
    """Before the receiver has found its store, which torch would try for a minute; or after."""
    before = receivers_of()
    own_trainer.tell(f"open_group('weights', {meeting.port}, world_size=3, timeout=60.0)")
    tie = Lifeline.tie

    def tie_and_kill(line: Lifeline, place: Meeting, deadline: float) -> None:
        tie(line, place, deadline)
        threading.Timer(after_s, own_trainer.process.kill).start()

    monkeypatch.setattr(Lifeline, "tie", tie_and_kill)
    made, began = WeightGroup(replace(meeting, world_size=3), CPU), time.monotonic()
    with pytest.raises(RequestError, match=r"or the trainer died \(the trainer's store has hung"):
        made.join(60)
    assert time.monotonic() - began < after_s + 15
    assert receivers_of() == before
