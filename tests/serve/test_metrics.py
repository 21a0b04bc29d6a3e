# SPDX-License-Identifier: Apache-2.0
"""Numbers for Prometheus."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tetrarch.engine.acceptance import Acceptance, SpecStatus
from tetrarch.engine.messages import Heartbeat
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, SamplingParams
from tetrarch.serve import metrics as module
from tetrarch.serve.metrics import Metrics, Throughput, Timeline

LOAD = Heartbeat(
    num_running=2,
    num_waiting=1,
    num_used_tokens=64,
    num_cached_tokens=32,
    max_total_tokens=256,
    counters={"prompt_tokens_total": 7.0, "cached_tokens_total": 3.0, "steps": 9.0},
)
REQUEST = GenerateRequest(rid="a", prompt_ids=(1,), sampling=SamplingParams())


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render(LOAD).decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def delta(count: int, *, finished: bool = False) -> Delta:
    finish = FinishReason(kind="length", length=count) if finished else None
    return Delta(rid="a", token_ids=tuple(range(count)), finish=finish)


def test_the_engines_numbers_keep_the_names_that_dashboards_read() -> None:
    found = samples(Metrics("demo"))
    assert found["sglang:num_running_reqs"] == 2
    assert found["sglang:num_queue_reqs"] == 1
    assert found["sglang:token_usage"] == 0.25
    assert found["sglang:kv_evictable_tokens"] == 32
    assert found["sglang:prompt_tokens_total"] == 7
    assert found["sglang:cached_tokens_total"] == 3
    assert found["tetrarch:steps"] == 9
    text = Metrics("demo").render(LOAD).decode()
    assert 'sglang:cached_tokens_total{cache_source="device",model_name="demo"} 3.0' in text
    assert "# TYPE sglang:prompt_tokens_total counter" in text
    assert "# TYPE sglang:num_running_reqs gauge" in text


def test_speculation_has_means_since_the_flush_and_totals_since_the_start() -> None:
    lifetime = Acceptance(num_verifies=10, num_tokens=25, num_proposed=30, num_accepted=15)
    recent = Acceptance(num_verifies=2, num_tokens=6, num_proposed=6, num_accepted=4)
    spec = SpecStatus(num_steps=3, lifetime=lifetime, since_flush=recent)
    text = Metrics("demo").render(msgspec.structs.replace(LOAD, spec=spec)).decode()
    for name, value in {
        "sglang:spec_accept_length": 3.0,
        "sglang:spec_accept_rate": 4 / 6,
        "sglang:spec_num_steps": 3.0,
        "sglang:spec_num_draft_tokens": 4.0,
        "sglang:spec_verify_calls_total": 10.0,
        "tetrarch:spec_verified_tokens_total": 25.0,
        "tetrarch:spec_proposed_drafts_total": 30.0,
        "tetrarch:spec_accepted_drafts_total": 15.0,
    }.items():
        assert f'{name}{{model_name="demo"}} {value}' in text
    assert "spec_" not in Metrics("demo").render(LOAD).decode()


def test_a_stream_is_timed_token_by_token(clock: Clock) -> None:
    metrics, timeline = Metrics("demo"), Timeline(started=99.5)
    metrics.observe(delta(1), of=REQUEST, timeline=timeline)
    clock.now += 0.25
    metrics.observe(delta(1), of=REQUEST, timeline=timeline)
    clock.now += 0.5
    metrics.observe(delta(2, finished=True), of=REQUEST, timeline=timeline)
    found = samples(metrics)
    assert found["sglang:time_to_first_token_seconds_sum"] == 0.5
    assert found["sglang:inter_token_latency_seconds_count"] == 3
    assert found["sglang:inter_token_latency_seconds_sum"] == pytest.approx(0.75)
    assert found["sglang:e2e_request_latency_seconds_sum"] == 1.25


def test_a_request_without_tokens_has_no_first_token(clock: Clock) -> None:
    metrics, timeline = Metrics("demo"), Timeline(started=clock.now)
    clock.now += 2
    metrics.observe(delta(0, finished=True), of=REQUEST, timeline=timeline)
    found = samples(metrics)
    assert found["sglang:time_to_first_token_seconds_count"] == 0
    assert found["sglang:e2e_request_latency_seconds_sum"] == 2


def test_a_probe_is_not_traffic() -> None:
    metrics = Metrics("demo")
    probe = GenerateRequest(rid="a", prompt_ids=(1,), sampling=SamplingParams(), is_probe=True)
    metrics.observe(delta(1, finished=True), of=probe, timeline=Timeline())
    found = samples(metrics)
    assert found["sglang:time_to_first_token_seconds_count"] == 0
    assert found["sglang:e2e_request_latency_seconds_count"] == 0


def test_loads_and_updates_are_timed_by_source_and_counted_by_result(clock: Clock) -> None:
    metrics = Metrics("demo")
    count = 'tetrarch:weight_update_total{{model_name="demo",result="{}",source="{}"}} {}'
    text = metrics.render(LOAD).decode()
    for source in ("disk", "tensor", "distributed"):  # a zero is there before the first failure
        assert count.format("success", source, 0.0) in text
        assert count.format("failure", source, 0.0) in text
    clock.now += 7
    metrics.observe_ready(load_s=2.5)
    assert metrics.startup_s == 7
    metrics.observe_update("disk", ok=True, seconds=0.5)
    metrics.observe_update("disk", ok=False, seconds=None)
    metrics.observe_update("tensor", ok=True, seconds=None)  # the update goes on
    text = metrics.render(LOAD).decode()
    timed = 'sglang:weight_load_duration_seconds_{}{{model_name="demo",source="disk"}} {}'
    assert timed.format("sum", 3.0) in text
    assert timed.format("count", 2.0) in text
    assert 'weight_load_duration_seconds_sum{model_name="demo",source="tensor"}' not in text
    assert count.format("success", "disk", 1.0) in text
    assert count.format("failure", "disk", 1.0) in text
    assert count.format("success", "tensor", 1.0) in text


def test_throughput_is_that_of_the_last_second(clock: Clock) -> None:
    throughput = Throughput()
    throughput.add(30)
    assert throughput.rate == 0  # the first window is open
    clock.now += 2
    assert throughput.rate == 15
    clock.now += 1
    assert throughput.rate == 0
