# SPDX-License-Identifier: Apache-2.0
"""The training corpus: generated problems, tokenized in parallel, packed into rows."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tetrarch.commands.arithmetic.problems import Problem, Split, problem

ROW_TOKENS = 256
PADDING, QUESTION, ANSWER = 0, 1, 2
TRAIN_SEED = 1
_HARD_IN_TEN = 3  # three problems in ten have larger numbers
_CHUNK = 5_000


def packed_corpus(folder: Path, num_problems: int, *, num_workers: int) -> tuple[Tensor, Tensor]:
    """Return token ids and kinds, both (rows, 256): int16 ids, uint8 kinds.

    Only problems of the `train` split are kept; a problem is never cut in two.
    """
    jobs = [
        (folder, start, min(num_problems, start + _CHUNK))
        for start in range(0, num_problems, _CHUNK)
    ]
    if num_workers > 1:
        with multiprocessing.get_context("fork").Pool(num_workers) as pool:
            parts = pool.map(_packed, jobs, chunksize=1)
    else:
        parts = [_packed(job) for job in jobs]
    ids = np.concatenate([part[0] for part in parts])
    kinds = np.concatenate([part[1] for part in parts])
    return torch.from_numpy(ids), torch.from_numpy(kinds)


def _packed(job: tuple[Path, int, int]) -> tuple[np.ndarray, np.ndarray]:
    folder, start, stop = job
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    rows: list[tuple[list[int], list[int]]] = [([], [])]
    for question, answer in _encoded(tokenizer, start, stop):
        if len(question) + len(answer) > ROW_TOKENS:
            continue
        ids, _ = rows[-1]
        if len(ids) + len(newline) + len(question) + len(answer) > ROW_TOKENS:
            rows.append(([], []))
        ids, kinds = rows[-1]
        lead = newline if ids else []
        ids += lead + question + answer
        kinds += [QUESTION] * (len(lead) + len(question)) + [ANSWER] * len(answer)
    packed_ids = np.zeros((len(rows), ROW_TOKENS), np.int16)
    packed_kinds = np.full((len(rows), ROW_TOKENS), PADDING, np.uint8)
    for row, (ids, kinds) in enumerate(rows):
        packed_ids[row, : len(ids)] = ids
        packed_kinds[row, : len(kinds)] = kinds
    return packed_ids, packed_kinds


def _encoded(tokenizer: Tokenizer, start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    kept = [item for item in map(_mixed, range(start, stop)) if item.split is Split.TRAIN]
    asked = [
        f"<|im_start|>user\n{item.question}<|im_end|>\n<|im_start|>assistant\n" for item in kept
    ]
    said = [f"{item.solution}<|im_end|>" for item in kept]
    questions = tokenizer.encode_batch(asked, add_special_tokens=False)
    answers = tokenizer.encode_batch(said, add_special_tokens=False)
    return [(q.ids, a.ids) for q, a in zip(questions, answers, strict=True)]


def _mixed(index: int) -> Problem:
    level = 2 if index % 10 >= 10 - _HARD_IN_TEN else 1
    return problem(index, seed=TRAIN_SEED, level=level)
