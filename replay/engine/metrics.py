"""The engine's counters and histograms, and their Prometheus text under vLLM's names.

Names, labels and buckets are those of vLLM 0.33 (`v1/metrics/loggers.py`), so that a scraper made for it works here:
no tenant, no priority on anything. What vLLM does not have stands under `convoy:`: how well the engine keeps its
own clock.

    queue = first scheduled - arrival        prefill = first token - first scheduled
    decode = last token - first token        inference = last token - first scheduled

A preempted request's second wait is inside decode (or prefill), never in queue; `vllm:num_preemptions_total` counts it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping

import msgspec

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (1, *(2**i for i in range(3, 15)))
_LATENESS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

FINISHED = ("stop", "length", "abort", "error", "repetition")
REJECTED = ("max_num_queued_reqs", "max_num_queued_tokens")


def _one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 ... up to `most`."""
    values = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(value for value in values if value <= most)


class Histogram:
    """Counts of values by upper bound (inclusive), as Prometheus keeps them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Gauges(msgspec.Struct, frozen=True):
    """The engine's state at the moment of the scrape."""

    running: int
    waiting: int
    kv_usage: float


class Finished(msgspec.Struct, frozen=True):
    """What a finished request leaves behind; times are CLOCK_MONOTONIC ns, 0 where it did not happen."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    preemptions: int
    arrival_ns: int
    scheduled_ns: int
    first_ns: int
    last_ns: int


class Metrics:
    """All counters of one engine.

    Args:
        model: the served model's name, a label of every series.
        max_model_len: sets the buckets of the token histograms.
        cache: labels of `vllm:cache_config_info`.
    """

    def __init__(self, model: str, max_model_len: int, cache: Mapping[str, object]) -> None:
        self.model = model
        self.cache = dict(cache)
        self.created_s = time.time()
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISHED, 0)
        self.rejected = dict.fromkeys(REJECTED, 0)
        self.steps = 0
        self.late_steps = 0
        self.slips = 0
        self.slipped_s = 0.0
        lengths = _one_two_five(max_model_len)
        self.step_tokens = Histogram(_STEP)
        self.ttft = Histogram(_TTFT)
        self.inter_token = Histogram(_TOKEN)
        self.per_output_token = Histogram(_TOKEN)
        self.e2e = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.inference = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self.prompt_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.n = Histogram((1, 2, 5, 10, 20))
        self.request_preemptions = Histogram((1, 2, 3, 4, 5, 10, 20))
        self.computed = Histogram(lengths)
        self.lateness = Histogram(_LATENESS)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request has its first token: its whole prompt is computed or was cached."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def ended(self, request: Finished) -> None:
        """Count a request that has ended, by its own end or by an abort."""
        self.finished[request.reason] += 1
        if request.reason == "abort" or not request.first_ns:
            return
        self.prompt_lengths.observe(request.prompt_tokens)
        self.output_lengths.observe(request.output_tokens)
        self.max_tokens.observe(request.max_tokens)
        self.request_preemptions.observe(request.preemptions)
        self.computed.observe(request.prompt_tokens - request.cached_tokens)
        decode_s = (request.last_ns - request.first_ns) / 1e9
        self.e2e.observe((request.last_ns - request.arrival_ns) / 1e9)
        self.queue.observe((request.scheduled_ns - request.arrival_ns) / 1e9)
        self.prefill.observe((request.first_ns - request.scheduled_ns) / 1e9)
        self.inference.observe((request.last_ns - request.scheduled_ns) / 1e9)
        self.decode.observe(decode_s)
        if request.output_tokens > 1:
            self.per_output_token.observe(decode_s / (request.output_tokens - 1))

    def text(self, gauges: Gauges) -> str:
        """The Prometheus text of this moment."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Gauges) -> Iterator[str]:
        own = f'engine="0",model_name="{_escape(self.model)}"'
        yield from _gauge("num_requests_running", own, gauges.running)
        yield from _gauge("num_requests_waiting", own, gauges.waiting)
        yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
        yield f'vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} {float(gauges.waiting)}'
        yield f'vllm:num_requests_waiting_by_reason{{{own},reason="deferred"}} 0.0'
        yield from _gauge("kv_cache_usage_perc", own, gauges.kv_usage)
        yield from self._counter("prefix_cache_queries", own, self.prompt_tokens)
        yield from self._counter("prefix_cache_hits", own, self.cached_tokens)
        yield from self._counter("num_preemptions", own, self.preemptions)
        yield from self._counter("prompt_tokens", own, self.prompt_tokens)
        yield from self._labelled(
            "prompt_tokens_by_source",
            own,
            "source",
            {
                "local_compute": self.prompt_tokens - self.cached_tokens,
                "local_cache_hit": self.cached_tokens,
                "external_kv_transfer": 0,
            },
        )
        yield from self._counter("prompt_tokens_cached", own, self.cached_tokens)
        yield from self._counter("generation_tokens", own, self.generation_tokens)
        yield from self._labelled("request_success", own, "finished_reason", self.finished)
        yield from self._labelled("admission_rejections", own.split(",")[1], "reason", self.rejected)
        for name, histogram in self._histograms():
            yield from _histogram(f"vllm:{name}", own, histogram)
        labels = ",".join(f'{key}="{_escape(str(value))}"' for key, value in sorted(self.cache.items()))
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{{labels},engine="0"}} 1.0'
        yield "# HELP convoy:engine_late_steps_total Steps that ended more than 5 % of their model time late."
        for name, value in (
            ("steps", self.steps),
            ("late_steps", self.late_steps),
            ("clock_slips", self.slips),
            ("clock_slipped_seconds", self.slipped_s),
        ):
            yield f"# TYPE convoy:engine_{name}_total counter"
            yield f"convoy:engine_{name}_total{{{own}}} {float(value)}"
        yield from _histogram("convoy:engine_step_lateness_seconds", own, self.lateness)

    def _histograms(self) -> tuple[tuple[str, Histogram], ...]:
        return (
            ("request_prompt_tokens", self.prompt_lengths),
            ("request_generation_tokens", self.output_lengths),
            ("request_max_num_generation_tokens", self.output_lengths),
            ("request_params_n", self.n),
            ("request_params_max_tokens", self.max_tokens),
            ("request_num_preemptions", self.request_preemptions),
            ("request_prefill_kv_computed_tokens", self.computed),
            ("iteration_tokens_total", self.step_tokens),
            ("time_to_first_token_seconds", self.ttft),
            ("inter_token_latency_seconds", self.inter_token),
            ("request_time_per_output_token_seconds", self.per_output_token),
            ("e2e_request_latency_seconds", self.e2e),
            ("request_queue_time_seconds", self.queue),
            ("request_inference_time_seconds", self.inference),
            ("request_prefill_time_seconds", self.prefill),
            ("request_decode_time_seconds", self.decode),
        )

    def _counter(self, name: str, labels: str, value: float) -> Iterator[str]:
        yield f"# TYPE vllm:{name}_total counter"
        yield f"vllm:{name}_total{{{labels}}} {float(value)}"
        yield f"# TYPE vllm:{name}_created gauge"
        yield f"vllm:{name}_created{{{labels}}} {self.created_s}"

    def _labelled(self, name: str, labels: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
        yield f"# TYPE vllm:{name}_total counter"
        for key, value in values.items():
            yield f'vllm:{name}_total{{{labels},{label}="{key}"}} {float(value)}'


def _gauge(name: str, labels: str, value: float) -> Iterator[str]:
    yield f"# TYPE vllm:{name} gauge"
    yield f"vllm:{name}{{{labels}}} {float(value)}"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    yield f"# TYPE {name} histogram"
    count = 0
    for bound, here in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += here
        shown = "+Inf" if bound == float("inf") else str(float(bound))
        yield f'{name}_bucket{{{labels},le="{shown}"}} {float(count)}'
    yield f"{name}_count{{{labels}}} {float(count)}"
    yield f"{name}_sum{{{labels}}} {histogram.total}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
