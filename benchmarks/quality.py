# SPDX-License-Identifier: Apache-2.0
"""What does each contract cost in quality? Accuracy and answer NLL of the demo model."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from provenance import provenance

from tetrarch import LLM
from tetrarch.commands.arithmetic.problems import Split, eval_split
from tetrarch.commands.eval import measure
from tetrarch.core.progress import NoProgress

CONTRACTS = (
    ("none", "bf16"),
    ("nvfp4_online", "bf16"),
    ("nvfp4_online", "per_token"),
    ("modelopt_fp4", "bf16"),
    ("modelopt_fp4", "per_tensor"),
)
SPLITS = (Split.TEST, Split.COMP, Split.HARD)


def main() -> None:
    """Measure every contract on every split; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=100, help="problems of each split")
    parser.add_argument("--model", default=None, help="the demo model by default")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/quality.json"))
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for quantization, activations in CONTRACTS:
        settings = {"quantization": quantization, "moe_activations": activations}
        with LLM(asked.model, **settings) as llm:
            for split in SPLITS:
                problems = list(islice(eval_split(split), asked.limit))
                score = measure(llm, problems, progress=NoProgress())
                rows.append(
                    {
                        **settings,
                        "split": split,
                        "problems": score.num_problems,
                        "accuracy": score.accuracy,
                        "answer_nll": score.answer_nll,
                    }
                )
                print(
                    f"| {quantization} / {activations} | {split} | {score.accuracy:.3f} "
                    f"| {score.answer_nll:.2e} |",
                    flush=True,
                )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
