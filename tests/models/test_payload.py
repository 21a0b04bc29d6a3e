# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.models import rebuilds, shared_file
from tetrarch.models.payload import decode_payload

GOLDEN = Path(__file__).parent / "payloads"
NAMED = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.arange(8, dtype=torch.uint8),
}

# A trainer: SGLang's two classes under their own paths, torch's pickler, one payload a line.
TRAINER = """
import base64, dataclasses, gc, sys, types
from multiprocessing.reduction import ForkingPickler
import torch
import torch.multiprocessing

def record(path, name, *fields):
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        package = ".".join(parts[:length])
        sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
    made = dataclasses.make_dataclass(name, fields)
    made.__module__ = path
    vars(sys.modules[path])[name] = made
    return made

Part = record("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata",
              "name", "shape", "dtype", "start_idx", "end_idx", "numel")
Ranks = record("sglang.srt.model_executor.model_runner", "LocalSerializedTensor", "values")

def dumps(value):
    return bytes(ForkingPickler.dumps(value))

def send(value):
    print(base64.b64encode(dumps(value)).decode(), flush=True)

def wait():
    sys.stdin.readline()

def place(tensor):
    return tensor.untyped_storage()._share_filename_cpu_()[1]

torch.multiprocessing.set_sharing_strategy("file_descriptor")
send([("a", torch.ones(2))])
torch.multiprocessing.set_sharing_strategy("file_system")
"""


class Trainer:
    """A sender in a process of its own."""

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER + body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.by_descriptor = self.receive()

    def receive(self) -> bytes:
        assert self.process.stdout is not None
        return base64.b64decode(self.process.stdout.readline())

    def proceed(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def check_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].float(), tensor.float()), name


# ---------------------------------------------------------------- what clients really send


@dataclass(frozen=True)
class Living:
    """A trainer that holds the golden payloads' tensors, and the name of each one's memory."""

    trainer: Trainer
    places: dict[str, bytes]


@pytest.fixture(scope="module")
def living() -> Iterator[Living]:
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in NAMED.values()])
    trainer = Trainer(f"""
tensors = dict(a=torch.arange(6.0).reshape(2, 3), b=torch.arange(4, dtype=torch.bfloat16),
               c=torch.arange(8, dtype=torch.uint8), flat=torch.tensor({flat.tolist()}).byte())
send({{name: place(tensor) for name, tensor in tensors.items()}})
wait()
""")
    yield Living(trainer, pickle.loads(trainer.receive()))
    trainer.end()


@pytest.fixture
def replay(living: Living, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """Golden payloads; where they name their dead sender's memory, the living one's is opened."""
    dead = json.loads((GOLDEN / "places.json").read_text())
    now = {place.encode(): living.places[name] for name, place in dead.items()}
    monkeypatch.setattr(
        rebuilds,
        "open_shared",
        lambda handle, num_bytes: shared_file.open_shared(now[handle], num_bytes),
    )
    monkeypatch.setattr(shared_file.SharedFile, "_give_back", lambda *_: None)  # it counted none
    return lambda name: (GOLDEN / f"{name}.pkl").read_bytes()


@pytest.mark.parametrize(
    ("name", "load_format"),
    [
        ("pairs", None),
        ("pairs", "direct"),
        ("bucket", "flattened_bucket"),
        ("ranks", None),
        ("ranks_older", None),
    ],
)
def test_a_golden_payload_is_read(
    replay: Callable[[str], bytes], name: str, load_format: str | None
) -> None:
    check_same(decode_payload(replay(name), load_format), NAMED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no CUDA")
@pytest.mark.parametrize("name", ["cuda_pairs", "cuda_bucket", "cuda_ranks"])
def test_a_golden_payload_of_cuda_tensors_is_read_as_far_as_their_device(name: str) -> None:
    """SGLang's own CUDA rebuild function is admitted; what is missing here is CUDA."""
    load_format = "flattened_bucket" if name == "cuda_bucket" else None
    with pytest.raises(RequestError, match="this server runs on a CPU"):
        decode_payload((GOLDEN / f"{name}.pkl").read_bytes(), load_format)


def test_a_living_trainer_is_read_and_may_go() -> None:
    """Tensors outlive their sender, and its shared memory goes when its own tensors go.

    torch counts a reference for every receiver; one that is not given back leaks the file. Before
    buckets held several dtypes, their metadata counted elements, not bytes.
    """
    trainer = Trainer("""
whole = torch.arange(24.0).reshape(4, 6)
send([("all", whole), ("columns", whole[:, 1:3]), ("turned", whole.T), ("none", torch.empty(0, 3)),
      ("scalar", torch.tensor(2.5)), ("parameter", torch.nn.Parameter(torch.ones(2))),
      ("fp8", torch.arange(4.0).to(torch.float8_e4m3fn)), ("u32", torch.arange(3).to(torch.uint32)),
      ("ranks", Ranks([dumps(torch.arange(5)), b"another rank's"])),
      ("again", Ranks([dumps(whole)]))])
wait()
whole.fill_(7)
handle = place(whole)
del whole
gc.collect()
send(handle)
flat = torch.arange(6, dtype=torch.bfloat16)
send({"flattened_tensor": flat, "metadata": [
    Part("x", torch.Size([2, 2]), torch.bfloat16, 0, 4, 4),
    Part("y", torch.Size([2]), torch.bfloat16, 4, 6, 2)]})
wait()
""")
    got = decode_payload(trainer.receive(), None)
    trainer.proceed()
    handle = pickle.loads(trainer.receive())
    assert not Path("/dev/shm" + handle.decode()).exists()
    late = trainer.receive()
    bucket = decode_payload(late, "flattened_bucket")
    trainer.end()

    numbers = torch.arange(6, dtype=torch.bfloat16)
    check_same(bucket, {"x": numbers[:4].reshape(2, 2), "y": numbers[4:]})
    whole = torch.arange(24.0).reshape(4, 6)
    expected = {
        "all": whole,
        "columns": whole[:, 1:3],
        "turned": whole.T,
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.ones(2),
        "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "u32": torch.arange(3).to(torch.uint32),
        "ranks": torch.arange(5),
        "again": whole,
    }
    check_same(got, expected)
    assert not any(tensor.requires_grad for tensor in got.values())
    assert got["all"].data_ptr() == got["again"].data_ptr()  # one copy of what was one storage
    _check_gone(trainer, late)


def _check_gone(trainer: Trainer, payload: bytes) -> None:
    deadline = time.monotonic() + 10  # torch's manager tidies up a moment after its process
    while any(Path("/dev/shm").glob(f"torch_{trainer.process.pid}_*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(RequestError, match="shared memory"):
        decode_payload(payload, "flattened_bucket")


def test_a_plain_pickle_is_read_with_its_bytes() -> None:
    """`pickle.dumps` puts the bytes inside; torch 2.13 itself cannot read its FP8 ones back."""
    tensors = NAMED | {"fp8": torch.arange(4.0).to(torch.float8_e5m2), "none": torch.empty(0, 2)}
    check_same(decode_payload(pickle.dumps(tensors), None), tensors)
    check_same(decode_payload(pickle.dumps(list(tensors.items()), protocol=3), None), tensors)


def test_sharing_by_descriptor_names_the_way_out(living: Living) -> None:
    with pytest.raises(RequestError, match="file descriptor") as error:
        decode_payload(living.trainer.by_descriptor, None)
    assert 'set_sharing_strategy("file_system")' in error.value.fix


# ---------------------------------------------------------------- damage, formats and names


def test_every_truncation_is_refused() -> None:
    payload = pickle.dumps(NAMED)
    for length in range(len(payload)):
        with pytest.raises(RequestError):
            decode_payload(payload[:length], None)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_random_bytes_and_flipped_bytes_are_refused_or_read() -> None:
    dice = random.Random(0)
    whole = pickle.dumps(NAMED)
    for number in range(1000):
        payload = bytearray(whole if number % 2 else dice.randbytes(dice.randrange(300)))
        for _ in range(dice.randrange(1, 4) if number % 2 else 0):
            payload[dice.randrange(len(payload))] = dice.randrange(256)
        try:
            got = decode_payload(bytes(payload), dice.choice([None, "flattened_bucket"]))
        except RequestError:
            continue
        assert all(isinstance(tensor, Tensor) for tensor in got.values())


@pytest.mark.parametrize("load_format", ["my.loader.load", "os.system", "", "auto"])
def test_a_loader_by_name_is_refused(load_format: str) -> None:
    with pytest.raises(RequestError, match="load_format") as error:
        decode_payload(pickle.dumps(NAMED), load_format)
    assert error.value.param == "load_format"


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "text",
        torch.ones(1),
        [torch.ones(1)],
        [("a",)],
        [("a", torch.ones(1), 3)],
        [(1, torch.ones(1))],
        [("a", 1.0)],
        [("", torch.ones(1))],
        [("line\nbreak", torch.ones(1))],
        [("\udc80", torch.ones(1))],
        [("x" * 2000, torch.ones(1))],
        {"flattened_tensor": torch.ones(1), "metadata": []},
    ],
)
def test_what_is_no_list_of_named_tensors_is_refused(value: object) -> None:
    with pytest.raises(RequestError) as error:
        decode_payload(pickle.dumps(value), None)
    assert len(str(error.value)) < 1000
    str(error.value).encode()


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="twice"):
        decode_payload(pickle.dumps([("a", torch.ones(1)), ("a", torch.ones(1))]), None)


def bucket(flat: Tensor, *parts: tuple[object, ...]) -> bytes:
    """A bucket's pickle, put together from opcodes: its class cannot be imported here."""
    fields = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    cls = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n)\x81"
    states = [_opcodes(dict(zip(fields, part, strict=True))) for part in parts]
    records = b"".join(cls + state + pickle.BUILD for state in states)
    items = [_opcodes("flattened_tensor"), _opcodes(flat), _opcodes("metadata"), b"](", records]
    return b"\x80\x03}(" + b"".join(items) + b"eu."


def _opcodes(value: object) -> bytes:
    return pickle.dumps(value, protocol=3)[2:-1]


U8, BF16 = torch.uint8, torch.bfloat16


def test_a_bucket_may_have_gaps_and_odd_places() -> None:
    flat = torch.arange(9, dtype=U8)
    got = decode_payload(
        bucket(
            flat, ("b", (2,), BF16, 5, 9, 4), ("a", (3,), U8, 0, 3, 3), ("0", (0,), U8, 3, 3, 0)
        ),
        "flattened_bucket",
    )
    check_same(
        got,
        {"b": flat[5:].clone().view(BF16), "a": flat[:3], "0": torch.empty(0, dtype=U8)},
    )


@pytest.mark.parametrize(
    "parts",
    [
        [("a", (9,), U8, 0, 9, 9)],
        [("a", (4,), U8, 6, 10, 4)],
        [("a", (4,), U8, 0, 4, 3)],
        [("a", (4,), U8, 4, 0, -4)],
        [("a", (4,), U8, -4, 0, 4)],
        [("a", (4,), BF16, 0, 4, 4)],
        [("a", (-2, -2), U8, 0, 4, 4)],
        [("a", (2**62, 4), U8, 0, 4, 4)],
        [("a", [4], U8, 0, 4, 4)],
        [("a", (4,), "uint8", 0, 4, 4)],
        [(1, (4,), U8, 0, 4, 4)],
        [("a", (4,), U8, 0, 4, 4), ("b", (4,), U8, 3, 7, 4)],
        [("a", (8,), U8, 0, 8, 8), ("b", (2,), U8, 3, 5, 2)],
        [("a", (4,), U8, 0, 4, 4), ("a", (4,), U8, 4, 8, 4)],
    ],
)
def test_a_bucket_that_does_not_add_up_is_refused(parts: list[tuple[object, ...]]) -> None:
    with pytest.raises(RequestError):
        decode_payload(bucket(torch.zeros(8, dtype=U8), *parts), "flattened_bucket")


@pytest.mark.parametrize(
    "value",
    [
        NAMED,
        {"flattened_tensor": torch.ones(2, 2), "metadata": []},
        {"metadata": []},
        [],
        None,
        {"flattened_tensor": torch.ones(2), "metadata": [{"name": "a"}]},
    ],
)
def test_what_is_no_bucket_is_refused(value: object) -> None:
    with pytest.raises(RequestError):
        decode_payload(pickle.dumps(value), "flattened_bucket")
