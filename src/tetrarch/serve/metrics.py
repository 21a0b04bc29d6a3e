# SPDX-License-Identifier: Apache-2.0
"""Counters for Prometheus, always on, in a registry of their own.

Names that dashboards and clients of SGLang read keep their spelling (`sglang:`); what only we
have starts with `tetrarch:`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tetrarch.engine.messages import Heartbeat
from tetrarch.engine.request import Delta, GenerateRequest
from tetrarch.serve.drafting import as_metrics

__all__ = ["Metrics", "Throughput", "Timeline"]

_LABELS = ("model_name",)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_E2E_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LOAD_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_SOURCES = ("disk", "tensor", "distributed")
_RESULTS = ("success", "failure")
_WINDOW_S = 1.0
_OURS = frozenset({"steps", "moe_tokens_high_water", "moe_buffer_capacity_tokens"})


class Throughput:
    """Tokens per second over about the last second; 0 once nothing comes any more."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._count = 0
        self._rate = 0.0

    def add(self, count: int) -> None:
        """Count tokens."""
        self._roll()
        self._count += count

    @property
    def rate(self) -> float:
        """Tokens per second of the last whole window."""
        self._roll()
        return self._rate

    def _roll(self) -> None:
        elapsed = time.monotonic() - self._since
        if elapsed >= _WINDOW_S:
            self._rate = self._count / elapsed
            self._since += elapsed
            self._count = 0


@dataclass(slots=True)
class Timeline:
    """When one output was asked for, and when it last grew, in monotonic seconds."""

    started: float = field(default_factory=time.monotonic)
    last_grown: float | None = None


class Metrics:
    """What one server has timed; the engine counts tokens and requests itself.

    Attributes:
        startup_s: Seconds from here to an engine that is ready; `None` until then.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._began = time.monotonic()
        self.startup_s: float | None = None
        self._registry = CollectorRegistry()
        self.throughput = Throughput()
        self._first_token = self._histogram("time_to_first_token_seconds", _TTFT_S)
        self._inter_token = self._histogram("inter_token_latency_seconds", _ITL_S)
        self._end_to_end = self._histogram("e2e_request_latency_seconds", _E2E_S)
        self._updates = Counter(
            "tetrarch:weight_update",
            "Calls that update the weights.",
            (*_LABELS, "source", "result"),
            registry=self._registry,
        )
        for source in _SOURCES:  # from the start: a rate needs the zero before the first failure
            for result in _RESULTS:
                self._updates.labels(model_name, source, result)
        self._load_time = Histogram(
            "sglang:weight_load_duration_seconds",
            "The first load; afterwards every update, from its first write to its last.",
            (*_LABELS, "source"),
            buckets=_LOAD_S,
            registry=self._registry,
        )

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        histogram = Histogram(
            f"sglang:{name}", text, _LABELS, buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model_name)

    def observe(self, delta: Delta, *, of: GenerateRequest, timeline: Timeline) -> None:
        """Time a delta; a probe is not traffic."""
        if of.is_probe:
            return
        now, count = time.monotonic(), len(delta.token_ids)
        if count:
            fresh = count
            if timeline.last_grown is None:
                self._first_token.observe(now - timeline.started)
                timeline.last_grown, fresh = now, count - 1
            for _ in range(fresh):  # a delta of many tokens weighs as much as many deltas
                self._inter_token.observe((now - timeline.last_grown) / fresh)
            timeline.last_grown = now
            self.throughput.add(count)
        if delta.finish is not None:
            self._end_to_end.observe(now - timeline.started)

    def observe_ready(self, *, load_s: float) -> None:
        """Note that the engine is ready, and how long it has loaded weights for that."""
        self.startup_s = time.monotonic() - self._began
        self._load_time.labels(self._model_name, "disk").observe(load_s)

    def observe_update(self, source: str, *, ok: bool, seconds: float | None) -> None:
        """Count a call that updates weights; time it where it has ended the update."""
        result = _RESULTS[0 if ok else 1]
        self._updates.labels(self._model_name, source, result).inc()
        if ok and seconds is not None:
            self._load_time.labels(self._model_name, source).observe(seconds)

    def render(self, load: Heartbeat) -> bytes:
        """Return the text exposition: our timings, and the engine's numbers as of `load`."""
        engine = CollectorRegistry()
        engine.register(_EngineNumbers(load, self.throughput.rate, self._model_name))
        return generate_latest(self._registry) + generate_latest(engine)


class _EngineNumbers(Collector):
    """The engine's last heartbeat as metrics."""

    def __init__(self, load: Heartbeat, rate: float, model_name: str) -> None:
        self._load, self._rate, self._model_name = load, rate, model_name

    def collect(self) -> Iterable[Metric]:
        load = self._load
        gauges = {
            "num_running_reqs": load.num_running,
            "num_queue_reqs": load.num_waiting,
            "num_paused_reqs": load.num_paused,
            "num_used_tokens": load.num_used_tokens,
            "kv_used_tokens": load.num_used_tokens,
            "kv_evictable_tokens": load.num_cached_tokens,
            "max_total_num_tokens": load.max_total_tokens,
            "token_usage": load.num_used_tokens / max(load.max_total_tokens, 1),
            "gen_throughput": self._rate,
        }
        for name, value in {**gauges, **load.counters}.items():
            extra = {"cache_source": "device"} if name == "cached_tokens_total" else {}
            about = name.removesuffix("_total").replace("_", " ").capitalize() + "."
            name = f"tetrarch:{name}" if name in _OURS else f"sglang:{name}"
            yield self._family(name, about, value, extra)
        for name, (about, value) in as_metrics(load.spec).items():
            yield self._family(name, about, value, {})

    def _family(self, name: str, about: str, value: float, extra: dict[str, str]) -> Metric:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, about, labels=(*_LABELS, *extra))
        family.add_metric((self._model_name, *extra.values()), value)
        return family
