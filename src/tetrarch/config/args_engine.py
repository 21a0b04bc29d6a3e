# SPDX-License-Identifier: Apache-2.0
"""The settings that say how much runs at once, and over what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tetrarch.core.knob import Alias, Knob

__all__ = ["EngineArgs"]


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Scheduling, KV cache, memory, ranks, graphs and speculation. `None` is `auto`."""

    chunked_prefill_size: Annotated[
        int | None,
        Knob(
            "Prompt tokens of one step; longer prompts are cut into such chunks. 0 or -1: prompts "
            "are never cut. auto: by device",
            unit="tokens",
            group="scheduling",
            at_least=-1,
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int,
        Knob(
            "Prompt tokens that one step takes from all requests together; caps the chunk",
            unit="tokens",
            group="scheduling",
            at_least=1,
        ),
    ] = 16384
    max_running_requests: Annotated[
        int | None,
        Knob(
            "Requests that may generate at once; auto: by device",
            unit="requests",
            group="scheduling",
            at_least=1,
        ),
    ] = None
    mixed_chunk: Annotated[
        bool,
        Knob(
            "Let running requests generate in the same step as a chunk of a prompt, so that long "
            "prompts do not make them wait",
            also=(Alias("--enable-mixed-chunk"),),
            group="scheduling",
        ),
    ] = True
    overlap_schedule: Annotated[
        str,
        Knob(
            "Whether the next step is prepared and launched while the device computes the last "
            "one. auto: on a GPU, without speculation",
            also=(Alias("--disable-overlap-schedule", means="off"),),
            choices=("auto", "on", "off"),
            group="scheduling",
        ),
    ] = "auto"

    page_size: Annotated[
        int | None,
        Knob("Tokens of one KV page; auto: 16", unit="tokens", group="kv cache", at_least=1),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Knob(
            "Most tokens the KV cache holds; auto: by memory",
            unit="tokens",
            group="kv cache",
            at_least=1,
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Knob(
            "Size of the KV cache; auto: by --kv-cache-fraction",
            unit="bytes",
            group="kv cache",
            at_least=1,
        ),
    ] = None
    kv_cache_fraction: Annotated[
        float | None,
        Knob(
            "Share of the memory left after loading that the KV cache takes (SGLang counts the "
            "weights into its share); auto: by device",
            also=(Alias("--mem-fraction-static"),),
            group="kv cache",
            at_least=0.01,
            at_most=0.99,
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        Knob(
            "Keep the pages of finished requests and reuse them for prompts that begin alike",
            also=(Alias("--disable-radix-cache", means="off"),),
            group="kv cache",
        ),
    ] = True

    enable_memory_saver: Annotated[
        bool,
        Knob(
            "Allocate GPU memory through torch_memory_saver, so that /release_memory_occupation "
            "can give it back; a CPU needs no such thing",
            group="memory",
        ),
    ] = False
    enable_weights_cpu_backup: Annotated[
        bool,
        Knob(
            "Keep released weights (on a GPU in host memory, on a CPU in a temporary file), so "
            "that resuming alone brings them back",
            group="memory",
        ),
    ] = False

    tp_size: Annotated[
        int,
        Knob(
            "Ranks that share every layer",
            also=(Alias("--tensor-parallel-size"), Alias("--tp")),
            unit="ranks",
            group="ranks",
            at_least=1,
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Knob(
            "Ranks that serve different requests",
            also=(Alias("--data-parallel-size"), Alias("--dp")),
            unit="ranks",
            group="ranks",
            at_least=1,
        ),
    ] = 1
    ep_size: Annotated[
        int | None,
        Knob(
            "Ranks that the experts are spread over; auto: all of them",
            also=(Alias("--expert-parallel-size"), Alias("--ep")),
            unit="ranks",
            group="ranks",
            at_least=1,
        ),
    ] = None

    cuda_graphs: Annotated[
        str,
        Knob(
            "Whether steps are captured as CUDA graphs",
            also=(Alias("--disable-cuda-graph", means="off"),),
            choices=("auto", "on", "off"),
            group="cuda graphs",
        ),
    ] = "auto"
    graph_max_batch: Annotated[
        int | None,
        Knob(
            "Largest decode batch that is captured; 0: none. auto: by device",
            also=(Alias("--cuda-graph-max-bs"), Alias("--cuda-graph-max-bs-decode")),
            unit="requests",
            group="cuda graphs",
            at_least=0,
        ),
    ] = None
    graph_max_prefill_tokens: Annotated[
        int | None,
        Knob(
            "Largest prefill that is captured; 0: none. auto: by device",
            also=(
                Alias("--prefill-graph-max-tokens"),
                Alias("--cuda-graph-max-bs-prefill"),
                Alias("--piecewise-cuda-graph-max-tokens"),
                Alias("--disable-piecewise-cuda-graph", means="0"),
            ),
            unit="tokens",
            group="cuda graphs",
            at_least=0,
        ),
    ] = None

    torch_compile: Annotated[
        str,
        Knob(
            "Whether decoder layers run through torch.compile, which fuses what lies around "
            "experts and attention. auto: on a GPU, for families whose layers were tested so",
            also=(
                Alias("--enable-torch-compile", means="on"),
                Alias("--disable-torch-compile", means="off"),
            ),
            choices=("auto", "on", "off"),
            group="compiled layers",
        ),
    ] = "auto"

    speculative_algorithm: Annotated[
        str | None,
        Knob(
            "Draft tokens with the model's own MTP layers; none, or not given: not at all",
            choices=("mtp", "none"),
            synonyms=(("MTP", "mtp"), ("EAGLE", "mtp"), ("NEXTN", "mtp")),  # in any case
            group="speculation",
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Knob(
            "Folder or hub name of the draft's weights, a whole checkpoint or MTP tensors alone; "
            "the model's own when not given",
            group="speculation",
        ),
    ] = None
    speculative_draft_quantization: Annotated[
        str,
        Knob(
            "Where the draft's 4-bit weights come from. auto: nvfp4_online binds it as it binds "
            "the model; else each tensor is what it is. nvfp4_online: quantize it while loading",
            also=(Alias("--speculative-draft-model-quantization"),),
            choices=("auto", "nvfp4_online", "modelopt_fp4", "none"),
            group="speculation",
        ),
    ] = "auto"
    speculative_num_steps: Annotated[
        int | None,
        Knob(
            "Draft steps before each verification; auto: 3",
            group="speculation",
            at_least=1,
            at_most=31,  # the tenth draft in a row is hardly ever right; a step's rows must end
        ),
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        Knob("Branches of a draft; a chain has 1", group="speculation", at_least=1, at_most=1),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        Knob(
            "Tokens verified at once; auto: the steps plus one",
            unit="tokens",
            group="speculation",
            at_least=1,
            at_most=32,
        ),
    ] = None
    speculative_adaptive: Annotated[
        bool,
        Knob(
            "Draft fewer tokens where few are accepted: text which cannot be foreseen runs at 0.97 "
            "of the speed without drafting, or more, over 200 tokens or 40 requests",
            group="speculation",
        ),
    ] = False
