# SPDX-License-Identifier: Apache-2.0
"""The settings that say what is computed: the model, its numbers, its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tetrarch.config.support import REFUSED, SUPPORT, dispatch_names, runner_names
from tetrarch.core.knob import Alias, Knob

__all__ = ["ModelArgs"]

_QUANTIZATION = (
    "Where the experts' 4-bit weights come from, and with it how their inputs are scaled.\n"
    "nvfp4_online: weights are quantized while a BF16, FP16 or FP8 checkpoint loads. Per token: "
    "every token gets a scale of its own, computed as it arrives, so that a loud token never "
    "costs a quiet neighbour its precision, and nothing needs calibrating.\n"
    "modelopt_fp4: weights come quantized, in a ModelOpt or compressed-tensors NVFP4 checkpoint. "
    "Per tensor: all tokens share one scale, which was calibrated beforehand and is stored with "
    "the weights.\n"
    "none: experts stay as the checkpoint has them; FP8 is decoded.\n"
    "auto: modelopt_fp4 for an NVFP4 checkpoint, nvfp4_online for the embedded demo model, "
    "else none"
)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Model, quantization and experts. `None` and `"auto"` leave the choice to `resolve`."""

    model: Annotated[
        str | None,
        Knob(
            "Checkpoint folder or hub name; the embedded demo model when not given",
            also=(Alias("--model-path"),),
            group="model",
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None, Knob("Folder of the tokenizer; the model's own when not given", group="model")
    ] = None
    served_model_name: Annotated[
        str | None,
        Knob("Name that clients see; MODEL as it was given by default", group="model"),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        Knob(
            "Serve token ids only: prompts are lists of ids, and outputs have no text",
            group="model",
        ),
    ] = False
    load_format: Annotated[
        str,
        Knob(
            "Where weights come from. safetensors: the checkpoint. dummy: random numbers, always "
            "the same, for benchmarks: the folder need hold no more than config.json, and where it "
            "has no tokenizer, token ids are served. auto: safetensors",
            choices=("auto", "safetensors", "dummy"),
            group="model",
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Knob(
            "Type of hidden states and dense weights; auto: the checkpoint's",
            choices=("auto", "bfloat16", "float16", "float32"),
            group="model",
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        Knob(
            "Longest prompt and output together; auto: the model's",
            unit="tokens",
            group="model",
            at_least=2,  # a prompt of one token and one that is drawn
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Knob("Jinja file for chat prompts; the tokenizer's own when not given", group="model"),
    ] = None

    quantization: Annotated[
        str,
        Knob(
            _QUANTIZATION,
            choices=("auto", "nvfp4_online", "modelopt_fp4", "none"),
            group="quantization",
        ),
    ] = "auto"
    moe_activations: Annotated[
        str,
        Knob(
            "What the experts' inputs are rounded to. per_token: NVFP4, one scale per row, "
            "computed on the fly. per_tensor: NVFP4, one static scale for all rows. "
            "bf16: not rounded. auto: what --quantization implies",
            also=(
                Alias("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", means="per_token"),
                Alias("SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16", means="bf16"),
            ),
            choices=("auto", "per_token", "per_tensor", "bf16"),
            group="quantization",
        ),
    ] = "auto"
    fp4_ignored_layers: Annotated[
        tuple[str, ...],
        Knob(
            "Expert layers that stay in BF16: names or runs of their parts (model.layers.3), "
            "globs (model.layers.4?.*), or re: and a regular expression",
            also=(Alias("SGLANG_FP4_IGNORED_LAYERS"),),
            group="quantization",
        ),
    ] = ()
    four_over_six: Annotated[
        bool,
        Knob(
            "Let every block of 16 activations choose whether its largest value becomes 6 or 4, "
            "whichever errs less. Online weights always choose",
            also=(Alias("FLASHINFER_NVFP4_4OVER6"),),
            group="quantization",
        ),
    ] = False
    four_over_six_e4m3_max: Annotated[
        str,
        Knob(
            "Largest block scale under four-over-six; 256 leaves room for the choice of 4",
            also=(Alias("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", means="256"),),
            choices=("448", "256"),
            group="quantization",
        ),
    ] = "448"
    four_over_six_error: Annotated[
        str,
        Knob(
            "Error that four-over-six minimises: mean absolute or mean squared",
            also=(Alias("FLASHINFER_NVFP4_4OVER6_ERR_MODE"),),
            choices=("mae", "mse"),
            synonyms=(("MAE", "mae"), ("MSE", "mse")),
            group="quantization",
        ),
    ] = "mae"
    four_over_six_half_error: Annotated[
        bool,
        Knob(
            "Measure that error on FP16 products, without the division",
            also=(Alias("FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH"),),
            group="quantization",
        ),
    ] = False
    fc2_input_scale: Annotated[
        float | None,
        Knob(
            "Per-token factor of the second GEMM's input. auto: 1/2688, which uses the whole range "
            "of the block scales; 1 is what SGLang's CuTe DSL runner does",
            group="quantization",
            at_least=1e-6,
            at_most=1,
        ),
    ] = None

    moe_runner: Annotated[
        str,
        Knob(
            "Kernels that compute the experts; auto: the first row of the support table that fits",
            also=(Alias("--moe-runner-backend"),),
            choices=("auto", *runner_names(SUPPORT)),
            refused=runner_names(REFUSED),
            group="experts",
        ),
    ] = "auto"
    moe_dispatch: Annotated[
        str,
        Knob(
            "How tokens reach experts on other ranks; auto: the first row that fits",
            also=(Alias("--moe-a2a-backend"),),
            choices=("auto", *dispatch_names(SUPPORT)),
            refused=dispatch_names(REFUSED),
            synonyms=(("none", "all_gather"), ("flashinfer", "all_to_all")),
            group="experts",
        ),
    ] = "auto"
    moe_wire: Annotated[
        str,
        Knob(
            "What dispatch sends: rows in BF16, or rows that are quantized before they leave",
            also=(Alias("SGLANG_MOE_NVFP4_DISPATCH", means="nvfp4"),),
            choices=("auto", "bf16", "nvfp4"),
            group="experts",
        ),
    ] = "auto"
    max_dispatch_tokens: Annotated[
        int | None,
        Knob(
            "Most tokens one rank may send in one all-to-all; auto: its largest forward",
            also=(Alias("SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK"),),
            unit="tokens",
            group="experts",
            at_least=1,
        ),
    ] = None
    fused_finalize: Annotated[
        bool,
        Knob(
            "Sum the top-k results with atomic adds in the second GEMM: faster, but the order of "
            "the sum, and with it the last bit, changes from run to run",
            also=(Alias("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE"),),
            group="experts",
        ),
    ] = False
    deterministic: Annotated[
        bool,
        Knob(
            "Same request, same bits, whatever else runs beside it; on the CPU, two to "
            "three times slower, and on a GPU without compiled layers",
            also=(
                Alias("--enable-deterministic-inference"),
                Alias("SGLANG_ENABLE_DETERMINISTIC_INFERENCE"),
            ),
            group="experts",
        ),
    ] = False
    decoded_cache: Annotated[
        str,
        Knob(
            "Whether the reference runner keeps decoded experts beside the packed ones: more "
            "memory, faster steps. auto: where they fit in a quarter of the memory",
            choices=("auto", "on", "off"),
            group="experts",
        ),
    ] = "auto"
