# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint again with its weights in FP8 or NVFP4, in the dialects that hubs publish.

    python tools/quantize_checkpoint.py /tmp/tiny /tmp/tiny-nvfp4 --form nvfp4_modelopt

For tests of the loader: names, shapes and scales are the producers', the rounding is the plainest
there is and shares no code with the engine, so that it can be its oracle.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["EXPERTS", "FORMS", "LINEARS", "quantize_checkpoint"]

Stored = tuple[dict[str, Tensor], Tensor]  # last word of the name → part, and what it decodes to

_CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MIDPOINTS = (_CODES[1:] + _CODES[:-1]) / 2
_FP8_MAX = 448.0


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Stored]:
    return lambda weight: ({"weight": weight.to(dtype)}, weight.to(dtype).float())


def _fp8_block(weight: Tensor) -> Stored:
    """DeepSeek: one scale per 128x128, the last blocks ragged."""
    rows, columns = weight.shape
    grid = (-(-rows // 128), -(-columns // 128))
    padded = torch.zeros(128 * grid[0], 128 * grid[1])
    padded[:rows, :columns] = weight
    scale = padded.reshape(grid[0], 128, grid[1], 128).abs().amax((1, 3)) / _FP8_MAX
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def _fp8_tensor(weight: Tensor) -> Stored:
    """ModelOpt FP8: one scale, and one for the inputs, without a dimension."""
    scale = weight.abs().max() / _FP8_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return parts, codes.float() * scale


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed codes, block scales, the global decode scale, and decoded values."""
    blocks = weight.unflatten(-1, (-1, 16))
    scale = weight.abs().max() / (6 * _FP8_MAX)
    block_scale = (blocks.abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
    step = (block_scale.float() * scale).unsqueeze(-1)
    nearest = torch.bucketize(blocks.abs() / step, _MIDPOINTS)
    values = (_CODES[nearest].copysign(blocks) * block_scale.float().unsqueeze(-1)) * scale
    nibbles = (nearest + 8 * blocks.signbit()).to(torch.uint8).flatten(-2)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, block_scale, scale, values.flatten(-2)


def _nvfp4_modelopt(weight: Tensor) -> Stored:
    codes, block_scale, scale, values = _nvfp4(weight)
    parts = {"weight": codes, "weight_scale": block_scale, "weight_scale_2": scale}
    return parts | {"input_scale": torch.tensor(0.003)}, values


def _nvfp4_compressed(weight: Tensor) -> Stored:
    """Second-level scales are reciprocals, and have a dimension."""
    codes, block_scale, scale, values = _nvfp4(weight)
    parts = {"weight_packed": codes, "weight_scale": block_scale}
    parts |= {"weight_global_scale": 1 / scale.reshape(1)}
    return parts | {"input_global_scale": 1 / torch.tensor([0.003])}, values


FORMS: Mapping[str, Callable[[Tensor], Stored]] = {
    "bf16": _cast(torch.bfloat16),
    "fp16": _cast(torch.float16),
    "fp8_block": _fp8_block,
    "fp8_tensor": _fp8_tensor,
    "nvfp4_modelopt": _nvfp4_modelopt,
    "nvfp4_compressed": _nvfp4_compressed,
}

_INPUTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_CONFIGS: Mapping[str, dict[str, object]] = {
    "fp8_block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []},
    "nvfp4_modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": [],
        "config_groups": {"group_0": {"weights": _INPUTS, "input_activations": _INPUTS}},
    },
    "nvfp4_compressed": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": [],
        "config_groups": {
            "group_0": {
                "weights": _INPUTS | {"strategy": "tensor_group"},
                "input_activations": _INPUTS | {"strategy": "tensor_group", "dynamic": "local"},
            }
        },
    },
}


def EXPERTS(name: str) -> bool:  # noqa: N802 -- a constant that is asked
    """Whether a weight is a routed expert's."""
    return ".experts." in name and name.endswith(".weight")


def LINEARS(name: str) -> bool:  # noqa: N802
    """Whether a weight is an expert's, a shared expert's or an attention projection."""
    return EXPERTS(name) or ("_proj" in name and name.endswith(".weight"))


def quantize_checkpoint(
    folder: Path, out: Path, form: str, *, which: Callable[[str], bool] = EXPERTS
) -> dict[str, Tensor]:
    """Write the checkpoint in `folder` to `out`, in another form.

    Args:
        folder: One safetensors file, `config.json`, and what else serving reads.
        out: Created; must not exist.
        form: A key of `FORMS`.
        which: Names of the weights to store in that form; the others stay.

    Returns:
        What a reader must see: every weight by name, decoded to FP32 where it was stored in `form`.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not which(name):
            stored[name] = values[name] = weight
            continue
        parts, values[name] = FORMS[form](weight.float())
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    if form in _CONFIGS:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = _CONFIGS[form]
        (out / "config.json").write_text(json.dumps(config, indent=2))
    return values


def main() -> None:
    """Rewrite one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--linears", action="store_true", help="attention and shared experts too")
    args = parser.parse_args()
    which = LINEARS if args.linears else EXPERTS
    values = quantize_checkpoint(args.folder, args.out, args.form, which=which)
    print(f"{sum(map(which, values))} of {len(values)} weights are {args.form} in {args.out}")


if __name__ == "__main__":
    main()
