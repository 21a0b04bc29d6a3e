# SPDX-License-Identifier: Apache-2.0
"""Train the demo model and write it as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import ANSWER, PADDING, QUESTION, ROW_TOKENS, packed_corpus
from export import checkpoint, config
from model import DemoModel, RouterLosses, Shape
from muon import Muon
from safetensors.torch import save_file
from torch import Tensor, nn

QUESTION_WEIGHT = 0.1
MTP_WEIGHT, MTP_DECAY = 0.3, 0.8
BALANCE_WEIGHT, Z_WEIGHT = 0.01, 1e-4
WARMUP_STEPS = 50
DECAY_FROM, FINAL_LR = 0.6, 0.02  # the rate falls linearly over the last 40 % of the time
LOG_EVERY_S = 20.0


def main() -> None:
    """Train until the clock runs out, then export."""
    asked = _arguments()
    torch.manual_seed(asked.seed)
    start = time.monotonic()
    ids, kinds = packed_corpus(asked.tokenizer, asked.problems, num_workers=asked.workers)
    tokens = int((kinds != PADDING).sum())
    print(f"{tokens / 1e6:.1f} M tokens in {len(ids)} rows, {time.monotonic() - start:.0f} s")
    model = DemoModel(Shape()).to(asked.device)
    log = _train(model, (ids.to(asked.device), kinds.to(asked.device)), asked)
    _export(model, asked.tokenizer, asked.out, log)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--problems", type=int, default=3_000_000)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def _train(
    model: DemoModel, corpus: tuple[Tensor, Tensor], asked: argparse.Namespace
) -> list[dict[str, float]]:
    optimizers = _optimizers(model, asked.lr)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_of: Callable[..., dict[str, Tensor]] = torch.compile(_losses) if asked.compile else _losses
    rows = max(1, asked.batch_tokens // ROW_TOKENS)
    kind = torch.device(asked.device).type
    log: list[dict[str, float]] = []
    start, last = time.monotonic(), 0.0
    for step, (ids, kinds) in enumerate(_batches(*corpus, rows, asked.seed)):
        elapsed = time.monotonic() - start
        if (done := elapsed / 60 / asked.minutes) >= 1:
            break
        _set_rates(optimizers, rates, _schedule(step, done))
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            losses = loss_of(model, ids, kinds)
        losses["total"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step < 2 or elapsed - last > LOG_EVERY_S:
            last = elapsed
            seen = {"step": step + 1, "sec": round(elapsed, 1)}
            seen["Mtok"] = round((step + 1) * ids.numel() / 1e6, 3)
            log.append(seen | {name: round(loss.item(), 4) for name, loss in losses.items()})
            print(log[-1], flush=True)
    return log


def _batches(ids: Tensor, kinds: Tensor, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(ids), generator=generator).to(ids.device)
        for batch in order.split(rows):
            if len(batch) == rows:
                yield ids[batch].long(), kinds[batch]


def _schedule(step: int, done: float) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (1.0 if done < DECAY_FROM else max(FINAL_LR, (1 - done) / (1 - DECAY_FROM)))


def _set_rates(
    optimizers: list[torch.optim.Optimizer], rates: list[list[float]], factor: float
) -> None:
    for optimizer, base in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * factor


def _optimizers(model: DemoModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW for embedding, head, routers and vectors."""
    vectors = ("embed_tokens", "lm_head", "mlp.gate.weight")
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or any(word in name for word in vectors)
        (rest if plain else matrices).append(parameter)
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, lr=lr), adam]


def _losses(model: DemoModel, ids: Tensor, kinds: Tensor) -> dict[str, Tensor]:
    weights = torch.zeros(kinds.shape, device=kinds.device)
    weights = weights.masked_fill(kinds == QUESTION, QUESTION_WEIGHT)
    weights = weights.masked_fill(kinds == ANSWER, 1.0)
    routers, mask = RouterLosses([], []), kinds != PADDING
    hidden = model.trunk(ids, mask, routers)
    target = _cross_entropy(model.lm_head(hidden), ids, weights, ahead=1)
    drafted = [
        _cross_entropy(logits, ids, weights, ahead=step + 1)
        for step, logits in enumerate(model.drafts(ids, hidden, mask, routers), start=1)
    ]
    decay = [MTP_DECAY**step for step in range(len(drafted))]
    mtp = sum(d * loss for d, loss in zip(decay, drafted, strict=True)) / sum(decay)
    balance = torch.stack(routers.balance).mean()
    z = torch.stack(routers.z).mean()
    total = target + MTP_WEIGHT * mtp + BALANCE_WEIGHT * balance + Z_WEIGHT * z
    named = {f"mtp{step}": loss.detach() for step, loss in enumerate(drafted, start=1)}
    return {"total": total, "main": target.detach(), "balance": balance.detach(), **named}


def _cross_entropy(logits: Tensor, ids: Tensor, weights: Tensor, *, ahead: int) -> Tensor:
    """Weighted mean over positions whose token `ahead` exists."""
    predicted = logits[:, :-ahead].float().flatten(0, 1)
    loss = F.cross_entropy(predicted, ids[:, ahead:].flatten(), reduction="none")
    weight = weights[:, ahead:].flatten()
    return (loss * weight).sum() / weight.sum()


def _export(model: DemoModel, tokenizer: Path, out: Path, log: list[dict[str, float]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copy(file, out)
    save_file(checkpoint(model), str(out / "model.safetensors"), {"format": "pt"})
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (out / "config.json").write_text(json.dumps(config(model.shape), indent=1))
    (out / "generation_config.json").write_text(json.dumps(generation))
    (out / "train_log.json").write_text(json.dumps(log))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
