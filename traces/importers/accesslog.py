"""Access logs as JSON lines: nginx (`log_format ... escape=json`) and Envoy (`json_format`), told by their field names.

nginx logs a request when it is over: its `time` (`msec`, `time_iso8601`, `time_local`) minus `request_time` is the
arrival. Envoy's `start_time` is the arrival; `duration` is in ms. Numbers may be strings, and `-` is null. Lengths are
taken where the gateway logs token counts, else they stay null. Paths and headers are used to tell endpoint, model and
tenant; they are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather
from traces.importers.clock import one_iso_ns
from traces.importers.intake import Intake
from traces.importers.jsonrows import exact_ns
from traces.importers.source import Source
from traces.importers.tables import one_count
from traces.units import NS_PER_MS, NS_PER_S
from traces.wire.asked import endpoint_of

_COLUMNS = (
    "tenant arrival_ns model endpoint input_tokens output_tokens tokens_source headers_ns end_ns status outcome error "
    "request_bytes response_bytes"
)
_AT_END = ("msec", "time_iso8601", "@timestamp", "time", "time_local", "timestamp", "ts")
_INPUT = ("input_tokens", "prompt_tokens", "llm_input_token", "gen_ai.usage.input_tokens")
_OUTPUT = ("output_tokens", "completion_tokens", "llm_output_token", "gen_ai.usage.output_tokens")
_ABSENT = (None, "-", "")
_FLAGS = {  # Envoy's response flags: why there is no good answer
    "DC": "client_abort",
    "UT": "timeout_total",
    "SI": "timeout_idle",
    "UF": "connect_error",
    "UH": "connect_error",
    "UC": "truncated",
    "DPE": "truncated",
}


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches with arrivals, durations, status, sizes, and lengths where they are logged."""
    gather = Gather(_COLUMNS, intake.metadata("accesslog", "unix"))
    for number, row in jsonrows.read(source, intake, dict):
        fields = {str(key).lower().replace("-", "_"): value for key, value in row.items()}
        try:
            values = _row(fields)
        except _Wrong as wrong:
            intake.bad_row(number, wrong.column, str(wrong))
            continue
        gather.add(*values)
        if gather.full:
            yield gather.take()
    yield from gather.rest()


class _Wrong(ValueError):
    def __init__(self, column: str | None, problem: str) -> None:
        super().__init__(problem)
        self.column = column


def _row(fields: dict[str, Any]) -> tuple[object, ...]:
    arrival, end = _times(fields)
    status = _number(fields, ("status", "response_code")) or None
    if status is not None and not 100 <= status <= 999:
        raise _Wrong("status", f"{status} is no HTTP status")
    outcome, error = _outcome(fields, status)
    tokens = _number(fields, _INPUT)
    path = str(_first(fields, ("path", "request_uri", "uri", "x_envoy_original_path")) or _requested(fields))
    return (
        _word(fields, ("tenant", "x_tenant", "http_x_tenant")),
        arrival,
        _word(fields, ("model", "x_model", "gen_ai.request.model", "x_ai_eg_model")),
        endpoint_of(path) or "other",
        tokens,
        _number(fields, _OUTPUT),
        None if tokens is None else "usage",
        _duration(fields, (("upstream_header_time", NS_PER_S), ("response_duration", NS_PER_MS))),
        end,
        status,
        outcome,
        error,
        _number(fields, ("bytes_received", "request_length", "content_length")),
        _number(fields, ("bytes_sent", "body_bytes_sent", "bytes")),
    )


def _times(fields: dict[str, Any]) -> tuple[int, int | None]:
    """(arrival, end after it)."""
    if (started := _first(fields, ("start_time",))) is not None:
        return _moment("start_time", started), _duration(fields, (("duration", NS_PER_MS),))
    for name in _AT_END:
        if (logged := _first(fields, (name,))) is not None:
            took = _duration(fields, (("request_time", NS_PER_S),))
            if took is None:
                raise _Wrong("request_time", "is missing: the log's time is the end of the request")
            return _moment(name, logged) - took, took
    raise _Wrong("time", "is missing: a request needs a time")


def _moment(name: str, value: Any) -> int:
    text = str(value)
    try:
        if text.replace(".", "", 1).isdigit():
            return exact_ns(Decimal(text), NS_PER_S) or 0
        return one_iso_ns(text)
    except ValueError as error:
        raise _Wrong(name, str(error)) from error


def _duration(fields: dict[str, Any], choices: tuple[tuple[str, int], ...]) -> int | None:
    for name, unit_ns in choices:
        value = _first(fields, (name,))
        if value is None:
            continue
        last = str(value).split(",")[-1].split(" : ")[-1].strip()  # nginx lists every upstream that was tried
        if last in {"-", ""}:
            continue
        try:
            duration = exact_ns(Decimal(last), unit_ns)
        except (InvalidOperation, ValueError) as error:
            raise _Wrong(name, f"{last[:40]!r} is not a duration") from error
        if duration is not None and duration < 0:
            raise _Wrong(name, f"{last} is below 0")
        return duration
    return None


def _number(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = _first(fields, (name,))
        if value is not None:
            try:
                return one_count(str(value))
            except ValueError as error:
                raise _Wrong(name, str(error)) from error
    return None


def _word(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    value = _first(fields, names)
    return None if value is None else str(value)[:200]


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in _ABSENT), None)


def _requested(fields: dict[str, Any]) -> str:
    """The path of nginx's `$request`: METHOD PATH PROTOCOL."""
    parts = str(fields.get("request") or "").split(" ")
    return parts[1] if len(parts) > 1 else ""


def _outcome(fields: dict[str, Any], status: int | None) -> tuple[str | None, str | None]:
    for flag in str(fields.get("response_flags") or "").split(","):
        if flag in _FLAGS:
            return _FLAGS[flag], None if flag == "DC" else _FLAGS[flag].partition("_")[0]
    if status == 499:
        return "client_abort", None
    if status is None:
        return "truncated", "closed"
    return (None, None) if 200 <= status < 300 else ("http_error", f"http {status}")
