"""AIPerf's per-request records (`profile_export.jsonl`): `metadata`, `metrics` with units, `error`.

Times in the metadata are epoch ns. The first token and the gaps between chunks come from the metrics; lengths are what
AIPerf counted. Rows of the warm-up phase are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.clock import UNIT_DIGITS
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, Moment, exact_ns
from traces.importers.source import Source
from traces.importers.tables import one_count

_COLUMNS = (
    "request_id session_id turn arrival_ns stream input_tokens output_tokens reasoning_tokens tokens_source headers_ns "
    "first_token_ns last_token_ns end_ns chunk_ns status outcome error"
)


class About(msgspec.Struct):
    """When and who."""

    request_start_ns: Moment
    x_request_id: str | None = None
    x_correlation_id: str | None = None
    turn_index: Count | None = None
    request_ack_ns: Moment | None = None
    request_end_ns: Moment | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False
    cancellation_time_ns: Moment | None = None


class Metric(msgspec.Struct):
    """A value with its unit."""

    value: Decimal | list[Decimal] | None = None
    unit: str = ""


class Failure(msgspec.Struct):
    """Why it failed; its message is not read."""

    code: int | None = None
    type: str | None = None


class Row(msgspec.Struct):
    """A line of the file."""

    metadata: About
    metrics: dict[str, Metric] = msgspec.field(default_factory=dict)
    error: Failure | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches with ids, sessions, lengths, the response's times and the outcome."""
    gather = Gather(_COLUMNS, intake.metadata("aiperf", "unix"))
    ids = Ids(intake, "metadata.x_request_id")
    warmup = 0
    for number, row in jsonrows.read(source, intake, Row):
        if row.metadata.benchmark_phase != "profiling":
            warmup += 1
            continue
        try:
            values = _row(row)
        except ValueError as error:
            intake.bad_row(number, "metrics", str(error))
            continue
        if ids.new(number, row.metadata.x_request_id):
            gather.add(*values)
        if gather.full:
            yield gather.take()
    yield from gather.rest()
    if warmup:
        intake.note(f"{warmup} rows of the warm-up left out")


def _row(row: Row) -> tuple[object, ...]:
    about = row.metadata
    start = about.request_start_ns
    status, outcome, error = _outcome(row)
    first = _duration(row, "time_to_first_token")
    chunks = _chunks(row, first)
    end = about.request_end_ns if about.request_end_ns is not None else about.cancellation_time_ns
    return (
        about.x_request_id,
        about.x_correlation_id,
        about.turn_index,
        start,
        True if first is not None else None,
        _count(row, "input_sequence_length", "error_isl"),
        _count(row, "output_sequence_length"),
        _count(row, "reasoning_token_count"),
        "tokenizer",
        None if about.request_ack_ns is None else about.request_ack_ns - start,
        first,
        chunks[-1] if chunks else first,
        None if end is None else end - start,
        chunks,
        status,
        outcome,
        error,
    )


def _outcome(row: Row) -> tuple[int | None, str | None, str | None]:
    if row.metadata.was_cancelled:
        return None, "client_abort", None
    if row.error is None:
        return 200, None, None
    code, kind = row.error.code, row.error.type or ""
    if "timeout" in kind.lower():
        return None, "timeout_total", "timeout"
    if code is not None and 300 <= code <= 599:
        return code, "http_error", f"http {code}"
    if "connect" in kind.lower():
        return None, "connect_error", "connect"
    return None, "stream_error", "stream"


def _chunks(row: Row, first: int | None) -> list[int] | None:
    gaps = row.metrics.get("inter_chunk_latency")
    if first is None or gaps is None or not isinstance(gaps.value, list):
        return None
    moments = [first]
    for gap in gaps.value:
        moments.append(moments[-1] + _ns(gap, gaps.unit))
    return moments


def _duration(row: Row, name: str) -> int | None:
    metric = row.metrics.get(name)
    if metric is None or not isinstance(metric.value, Decimal):
        return None
    return _ns(metric.value, metric.unit)


def _ns(value: Decimal, unit: str) -> int:
    unit = {"sec": "s", "seconds": "s"}.get(unit, unit)
    if unit not in UNIT_DIGITS:
        raise ValueError(f"unit {unit!r} is no time")
    moment = exact_ns(value, 10 ** UNIT_DIGITS[unit]) or 0
    if moment < 0:
        raise ValueError(f"{value} {unit} is below 0")
    return moment


def _count(row: Row, *names: str) -> int | None:
    for name in names:
        metric = row.metrics.get(name)
        if metric is not None and isinstance(metric.value, Decimal):
            try:
                return one_count(str(metric.value))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
    return None
