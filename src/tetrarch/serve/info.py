# SPDX-License-Identifier: Apache-2.0
"""What is being served and how: model cards, model and server info."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.config.args import LaunchArgs
from tetrarch.core.knob import knobs
from tetrarch.serve.body import json_response
from tetrarch.serve.door import Door
from tetrarch.serve.drafting import as_state

__all__ = ["get_weight_version", "model_card", "model_info", "models", "server_info"]

MASK = "***"
_GRAPHS = "cuda_graph"  # the region's name
_SECRETS = frozenset(field.name for field in knobs(LaunchArgs) if field.knob.secret)


async def models(door: Door, _: Request) -> Response:
    """List the one model that is served."""
    return json_response({"object": "list", "data": [_card(door)]})


async def model_card(door: Door, http: Request) -> Response:
    """Describe a model by name, or answer 404."""
    name: str = http.path_params["name"]
    if name == door.plan.model.served_name:
        return json_response(_card(door))
    error = {
        "message": f"The model {name!r} does not exist; served is {door.plan.model.served_name!r}",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, status=404)


def _card(door: Door) -> dict[str, Any]:
    model = door.plan.model
    return {
        "id": model.served_name,
        "object": "model",
        "created": door.created,
        "owned_by": "tetrarch",
        "root": door.model_path,
        "parent": None,
        "max_model_len": model.context_len,
    }


async def model_info(door: Door, _: Request) -> Response:
    """Describe the checkpoint."""
    model = door.plan.model
    return json_response(
        {
            "model_path": door.model_path,
            "served_model_name": model.served_name,
            "tokenizer_path": model.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": door.weight_version,
            "load_format": "dummy" if model.load_format == "dummy" else "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.facts.model_type,
            "architectures": model.facts.architectures,
        }
    )


async def get_weight_version(door: Door, _: Request) -> Response:
    """Name the version of the weights."""
    return json_response({"weight_version": door.weight_version})


async def server_info(door: Door, _: Request) -> Response:
    """Report everything that was decided, why, and how large it came out. Secrets are masked."""
    plan = door.plan
    facts, load = door.client.facts(), door.client.load
    capacity = load.max_total_tokens
    limits = cast("dict[str, int]", facts.get("limits", {}))
    parts: dict[str, Any] = _masked(msgspec.to_builtins(plan))
    state = {
        **_flags(door),
        "world_size": plan.parallel.world_size,
        "effective_max_running_requests_per_dp": plan.schedule.max_running_requests,
        "last_gen_throughput": door.metrics.throughput.rate,
        "memory_usage": _memory_gb(facts, capacity),
        "decode_cuda_graph_bs": plan.graphs.decode_batches,
        "decode_cuda_graph_memory_gb": _graphs_gb(facts),
        "num_used_tokens": load.num_used_tokens,
        "counters": load.counters,
        **as_state(load.spec),
    }
    return json_response(
        {
            **_flags(door),
            "status": door.client.state.value,
            "startup_time": door.metrics.startup_s,
            "version": version("tetrarch"),
            "frontend": "http",
            "launch_command": _masked_command(sys.argv),
            "max_total_num_tokens": capacity,
            "max_req_input_len": limits.get("max_tokens", plan.model.context_len) - 1,
            "weight_version": door.weight_version,
            "weights": load.state,
            "is_paused": load.is_paused,
            "is_updating": load.is_updating,
            "updating_s": load.updating_s,
            "kv_events": None,
            "engine": facts,
            "plan": {name: part for name, part in parts.items() if name != "decisions"},
            "resolution_log": plan.decisions,
            "internal_states": [state],
        }
    )


def _flags(door: Door) -> dict[str, Any]:
    """The plan under the names of the flags of SGLang, whose clients compare them."""
    plan, spec = door.plan, door.plan.spec
    contract = plan.quant.contract
    return {
        "model_path": door.model_path,
        "tokenizer_path": plan.model.tokenizer_path,
        "served_model_name": plan.model.served_name,
        "dtype": plan.model.dtype,
        "context_length": plan.model.context_len,
        "quantization": contract.quantization,
        "moe_activations": contract.activations,
        "moe_runner_backend": plan.experts.route.runner,
        "moe_a2a_backend": plan.experts.route.dispatch,
        "tp_size": plan.parallel.tp,
        "dp_size": plan.parallel.dp,
        "ep_size": plan.parallel.ep,
        "pp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "host": plan.serve.host,
        "port": plan.serve.port,
        "device": plan.device.torch_device,
        "enable_memory_saver": plan.memory.saver,
        "enable_weights_cpu_backup": plan.memory.weights_backup,
        "enable_metrics": True,
        "max_running_requests": plan.schedule.max_running_requests,
        "max_prefill_tokens": plan.schedule.max_prefill_tokens,
        "chunked_prefill_size": plan.schedule.chunk_tokens or -1,
        "enable_mixed_chunk": plan.schedule.mixed_chunk,
        "disable_overlap_schedule": not plan.schedule.overlap,
        "disable_radix_cache": not plan.schedule.prefix_cache,
        "page_size": plan.memory.page_size,
        "stream_interval": plan.serve.stream_interval,
        "incremental_streaming_output": plan.serve.incremental_streaming,
        "allow_auto_truncate": plan.serve.allow_auto_truncate,
        "enable_deterministic_inference": plan.deterministic,
        "speculative_algorithm": spec.algorithm if spec else None,
        "speculative_num_steps": spec.num_steps if spec else None,
        "speculative_eagle_topk": 1 if spec else None,
        "speculative_num_draft_tokens": spec.num_draft_tokens if spec else None,
        "disaggregation_mode": "null",
        "api_key": MASK if plan.serve.api_key else None,
        "admin_api_key": MASK if plan.serve.admin_api_key else None,
    }


def _memory_gb(facts: dict[str, Any], capacity: int) -> dict[str, Any]:
    """Bytes by region as GB, under the names that benchmarks read."""
    regions = cast("dict[str, int]", facts.get("memory", {}))
    names = {"weights": "weight", "kv_cache": "kvcache"}
    usage: dict[str, Any] = {
        names.get(region, region): size / 1e9
        for region, size in regions.items()
        if region != _GRAPHS
    }
    if "startup_available" in facts:  # before anything was loaded
        usage["startup_available"] = facts["startup_available"] / 1e9
    graphs = {"decode": _graphs_gb(facts)} if _GRAPHS in regions else {}
    return {**usage, "token_capacity": capacity, "graph": graphs}


def _graphs_gb(facts: dict[str, Any]) -> float:
    return cast("dict[str, int]", facts.get("memory", {})).get(_GRAPHS, 0) / 1e9


def _masked(value: Any) -> Any:
    """Hide every secret of a nested value."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {
            key: MASK if key in _SECRETS and item is not None else _masked(item)
            for key, item in items
        }
    if isinstance(value, list):
        return [_masked(item) for item in cast("list[Any]", value)]
    return value


def _masked_command(arguments: list[str]) -> str:
    """Return the command line without the values of secret flags."""
    flags = {f"--{name.replace('_', '-')}" for name in _SECRETS}
    shown: list[str] = []
    for argument in arguments:
        flag, has_value, _ = argument.partition("=")
        if shown and shown[-1] in flags:
            shown.append(MASK)
        else:
            shown.append(f"{flag}={MASK}" if has_value and flag in flags else argument)
    return " ".join(shown)
