# SPDX-License-Identifier: Apache-2.0
"""A damaged checkpoint is refused at every door alike: what, why, fix, and no engine started."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tetrarch.__main__ import main
from tetrarch.core.errors import TetrarchError
from tetrarch.engine.process import EngineProcess
from tetrarch.llm import LLM

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NOBODY = 65534
Damage = Callable[[Path], object]


def put(name: str, content: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)  # may be a link to the demo model's own
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def edit(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        put(name, json.dumps(content | changes))(folder)

    return damage


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        put(name, content[: int(len(content) * share)])(folder)

    return damage


def folder_at(name: str) -> Damage:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def locked(name: str) -> Damage:
    """Taken from everybody; root becomes nobody for as long as the test runs."""

    def damage(folder: Path) -> None:
        put(name, (folder / name).read_bytes())(folder)
        (folder / name).chmod(0)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)

    return damage


def sharded(change: Damage) -> Damage:
    """In two shards with an index, then damaged."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = sorted(tensors)
        halves = (names[: len(names) // 2], names[len(names) // 2 :])
        for shard, half in zip(SHARDS, halves, strict=True):
            save_file({name: tensors[name] for name in half}, folder / shard)
        placed = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
        (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
        (folder / WEIGHTS).unlink()
        change(folder)

    return damage


def reindexed(to: object) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = to
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def twice(folder: Path) -> None:
    shard = load_file(folder / SHARDS[1]) | load_file(folder / SHARDS[0])
    save_file(shard, folder / SHARDS[1])


HUGE = (1 << 62).to_bytes(8, "little") + b"{}"
DEEP = "[" * 100_000

# Case: what is done to a copy of the demo model, and a word that the refusal must hold.
CASES: dict[str, tuple[Damage, str]] = {
    "weights cut": (cut(WEIGHTS, 0.5), WEIGHTS),
    "weights cut in the header": (cut(WEIGHTS, 0.001), WEIGHTS),
    "weights empty": (put(WEIGHTS, b""), WEIGHTS),
    "weights garbage": (put(WEIGHTS, b"\xff\x00garbage" * 99), WEIGHTS),
    "weights a git-lfs pointer": (put(WEIGHTS, "version https://git-lfs"), "git lfs pull"),
    "weights with a huge header": (put(WEIGHTS, HUGE), "header of 4611686018427387904 bytes"),
    "weights locked": (locked(WEIGHTS), "permissions"),
    "index empty": (sharded(put(INDEX, "")), INDEX),
    "index garbage": (sharded(put(INDEX, b"\xff\xff")), INDEX),
    "index a list": (sharded(put(INDEX, "[]")), INDEX),
    "index deep": (sharded(put(INDEX, DEEP)), INDEX),
    "index without a map": (sharded(put(INDEX, "{}")), "weight_map"),
    "index names a missing shard": (sharded(reindexed("gone.safetensors")), "gone.safetensors"),
    "index names the wrong shard": (sharded(reindexed(SHARDS[0])), "model.norm.weight"),
    "index names a shard elsewhere": (sharded(reindexed("../x.safetensors")), "outside"),
    "index names an absolute shard": (sharded(reindexed("/etc/passwd")), "outside"),
    "index names a number": (sharded(reindexed(5)), INDEX),
    "a shard missing": (sharded(without(SHARDS[1])), SHARDS[1]),
    "a shard a link to nowhere": (
        sharded(lambda f: ((f / SHARDS[1]).unlink(), (f / SHARDS[1]).symlink_to("gone"))),
        SHARDS[1],
    ),
    "a shard empty": (sharded(put(SHARDS[1], b"")), SHARDS[1]),
    "a tensor twice": (sharded(twice), "twice"),
    "config missing": (without(CONFIG), "config.json"),
    "config empty": (put(CONFIG, ""), CONFIG),
    "config cut": (cut(CONFIG, 0.5), CONFIG),
    "config a list": (put(CONFIG, "[]"), CONFIG),
    "config null": (put(CONFIG, "null"), CONFIG),
    "config not UTF-8": (put(CONFIG, b'{"a": "\xff"}'), CONFIG),
    "config deep": (put(CONFIG, DEEP), CONFIG),
    "config a folder": (folder_at(CONFIG), CONFIG),
    "config locked": (locked(CONFIG), "permissions"),
    "config of nothing": (put(CONFIG, "{}"), "config"),
    "config of another kind": (edit(CONFIG, model_type="never_heard_of"), "never_heard_of"),
    "no positions": (edit(CONFIG, max_position_embeddings=0), "max_position_embeddings is 0"),
    "no type": (edit(CONFIG, dtype="int7"), "int7"),
    "end token a text": (edit(CONFIG, eos_token_id="2"), "eos_token_id"),
    "end token too large": (edit(CONFIG, eos_token_id=1024), "1024"),
    "generation empty": (put(GENERATION, ""), GENERATION),
    "generation a list": (put(GENERATION, "[1]"), GENERATION),
    "generation not UTF-8": (put(GENERATION, b"\xff"), GENERATION),
    "generation locked": (locked(GENERATION), "permissions"),
    "generation's end token wrong": (edit(GENERATION, eos_token_id=[2, "3"]), GENERATION),
    "generation's end token too large": (edit(GENERATION, eos_token_id=[2, 9999]), "9999"),
    "tokenizer missing": (without(TOKENIZER), TOKENIZER),
    "tokenizer and its config missing": (without(TOKENIZER, TOKENIZER_CONFIG), TOKENIZER_CONFIG),
    "tokenizer empty": (put(TOKENIZER, ""), "tokenizer"),
    "tokenizer cut": (cut(TOKENIZER, 0.5), "tokenizer"),
    "tokenizer not UTF-8": (put(TOKENIZER, b"\xff\xff"), "tokenizer"),
    "tokenizer a list": (put(TOKENIZER, "[]"), "tokenizer"),
    "tokenizer of nothing": (put(TOKENIZER, "{}"), "tokenizer"),
    "tokenizer deep": (put(TOKENIZER, DEEP), "tokenizer"),
    "tokenizer without a model": (edit(TOKENIZER, model=None), "tokenizer"),
    "tokenizer a folder": (folder_at(TOKENIZER), "tokenizer"),
    "tokenizer locked": (locked(TOKENIZER), "tokenizer"),
    "tokenizer config missing": (without(TOKENIZER_CONFIG), TOKENIZER_CONFIG),
    "tokenizer config empty": (put(TOKENIZER_CONFIG, ""), "tokenizer"),
    "tokenizer config a list": (put(TOKENIZER_CONFIG, "[]"), "tokenizer"),
    "tokenizer config not UTF-8": (put(TOKENIZER_CONFIG, b"\xff"), "tokenizer"),
    "tokenizer config's end wrong": (edit(TOKENIZER_CONFIG, eos_token=5), "tokenizer"),
    "chat template not UTF-8": (put("chat_template.jinja", b"\xff"), "tokenizer"),
    "chat template cut": (put("chat_template.jinja", "{% if"), "chat template"),
    "an empty folder": (lambda f: [one.unlink() for one in f.iterdir()], "config.json"),
}


@pytest.fixture
def copy(demo_path: Path) -> Iterator[Path]:
    """The demo model where anybody may look; its weights are a link."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    folder = root / "model"
    folder.mkdir()
    for file in demo_path.iterdir():
        if file.name == WEIGHTS:
            (folder / WEIGHTS).symlink_to(file)
        else:
            shutil.copy(file, folder)
    was_root = os.geteuid() == 0
    yield folder
    if was_root:
        os.seteuid(0)
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: EngineProcess, *args: object, **keywords: object) -> None:
        raise AssertionError("an engine was started for a damaged checkpoint")

    monkeypatch.setattr(EngineProcess, "__init__", start)


@pytest.mark.parametrize("case", CASES)
def test_every_door_refuses_alike(
    copy: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, word = CASES[case]
    damage(copy)
    with pytest.raises(TetrarchError) as caught:
        LLM(str(copy), device="cpu")
    error = caught.value
    assert word in str(error)
    assert all((error.what, error.why, error.fix))
    capsys.readouterr()
    for words in (["explain"], ["serve", "--port", "0"], ["generate", "--prompt", "1 + 1 ="]):
        assert main([words[0], str(copy), "--device", "cpu", *words[1:]]) == 1
        told = capsys.readouterr().err
        assert str(error) in told, words
        assert "Traceback" not in told


def test_the_copy_itself_is_sound(copy: Path) -> None:
    """Negative control: whole or in shards, it gets as far as starting an engine."""
    for damage in (lambda _: None, sharded(lambda _: None)):
        damage(copy)
        assert main(["explain", str(copy), "--device", "cpu"]) == 0
        with pytest.raises(AssertionError, match="an engine was started"):
            LLM(str(copy), device="cpu")


@pytest.mark.parametrize("name", ["tokenizer.json", "gone"])
def test_a_path_that_is_no_folder_is_refused_at_every_door(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = str(copy / name)
    with pytest.raises(TetrarchError, match="not a folder"):
        LLM(path)
    for words in (["explain", path], ["serve", path], ["generate", path, "--prompt", "x"]):
        assert main(words) == 1
        assert "not a folder" in capsys.readouterr().err


def test_a_tokenizer_elsewhere_must_be_there(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["explain"], ["serve", "--port", "0"], ["generate", "--prompt", "x"]):
        assert main([*words, str(copy), "--tokenizer-path", str(copy / "gone")]) == 1
        assert "cannot load a tokenizer from" in capsys.readouterr().err
