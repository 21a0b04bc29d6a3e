# SPDX-License-Identifier: Apache-2.0
"""Every setting of the server, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tetrarch.config.args_engine import EngineArgs
from tetrarch.config.args_model import ModelArgs
from tetrarch.core.knob import Alias, Knob

__all__ = ["GROUPS", "LaunchArgs"]

# Heading of `--help` and of the reference: what it is about.
GROUPS: dict[str, str] = {
    "model": "which checkpoint, and how it is named",
    "quantization": "what numbers the experts are made of",
    "experts": "how the experts are computed",
    "scheduling": "who runs, and how many tokens a step may have",
    "kv cache": "how much is remembered",
    "memory": "what is given back while the server lives",
    "ranks": "over how many devices",
    "cuda graphs": "what is captured",
    "compiled layers": "what torch.compile fuses",
    "speculation": "drafting several tokens a step",
    "server": "the HTTP door",
    "machine": "what it runs on",
}


# The bases come last first: dataclass fields follow the reversed order of resolution.
@dataclass(frozen=True, kw_only=True)
class LaunchArgs(EngineArgs, ModelArgs):
    """What the operator said. Nothing here is resolved; `resolve` turns it into a `Plan`."""

    host: Annotated[str, Knob("Address to listen on; 0.0.0.0: every interface")] = "127.0.0.1"
    port: Annotated[int, Knob("Port to listen on", at_least=0, at_most=65535)] = 30000
    api_key: Annotated[
        str | None, Knob("Key that clients must present as a bearer token", secret=True)
    ] = None
    admin_api_key: Annotated[
        str | None, Knob("Key that alone opens the control endpoints", secret=True)
    ] = None
    weights_root: Annotated[
        str | None,
        Knob(
            "Folder that /update_weights_from_disk may read; not set: any while --host is this "
            "machine only, else the one that holds the model"
        ),
    ] = None
    log_level: Annotated[
        str, Knob("Least severe log line shown", choices=("debug", "info", "warning", "error"))
    ] = "info"
    incremental_streaming_output: Annotated[
        bool, Knob("Stream at /generate only what is new, instead of everything so far")
    ] = False
    allow_auto_truncate: Annotated[
        bool, Knob("Cut prompts that are too long, instead of refusing them")
    ] = False
    stream_interval: Annotated[
        int, Knob("Output tokens between two streamed pieces", unit="tokens", at_least=1)
    ] = 1
    max_body_bytes: Annotated[
        int, Knob("Largest request body that is read", unit="bytes", at_least=1)
    ] = 1 << 26  # ten million token ids
    enable_metrics: Annotated[bool, Knob("Serve /metrics; it is always served")] = True

    device: Annotated[
        str,
        Knob(
            "Where to run; auto: a CUDA device where there is one",
            choices=("auto", "cpu", "cuda"),
            group="machine",
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Knob(
            "Who computes attention; auto: Triton on a GPU, torch on a CPU",
            choices=("auto", "torch", "triton"),
            synonyms=(("torch_native", "torch"),),
            group="machine",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Knob(
            "CPU threads of the engine process; auto: the physical cores, less one for HTTP; on a "
            "GPU at most 8",
            also=(Alias("OMP_NUM_THREADS"),),
            group="machine",
            at_least=1,
        ),
    ] = None
