"""OpenTelemetry GenAI spans as OTLP JSON: one `resourceSpans` object, or one a line (the collector's file exporter).

A span is a request when it names a GenAI operation that reaches a model (`chat`, `text_completion`, `generate_content`,
`embeddings`), or a model or token counts without an operation (older instrumentations, vLLM's own spans). Spans of
agents and tools are left out and counted. Attribute names are those of the semantic conventions, older spellings too;
texts in attributes and events are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import Moment, exact_ns
from traces.importers.source import Source
from traces.importers.tables import one_count
from traces.units import NS_PER_S

_COLUMNS = (
    "request_id session_id arrival_ns model endpoint stream max_tokens n input_tokens output_tokens cached_tokens "
    "reasoning_tokens tokens_source first_token_ns end_ns queue_ns prefill_ns status outcome finish_reason error"
)
_ENDPOINTS = {
    "chat": "chat",
    "text_completion": "completions",
    "generate_content": "generate",
    "embeddings": "embeddings",
}
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens")
_CACHED = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "gen_ai.usage.cached_input_tokens",
)
_REASONING = ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens")
_MODEL = ("gen_ai.request.model", "gen_ai.response.model")
_FIRST_S = (
    "gen_ai.response.time_to_first_chunk",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.server.time_to_first_token",
)


class Value(msgspec.Struct):
    """An attribute's value; strings are kept only where a column needs one."""

    stringValue: str | None = None  # noqa: N815 - OTLP's spelling
    intValue: int | None = None  # noqa: N815
    doubleValue: Decimal | None = None  # noqa: N815
    boolValue: bool | None = None  # noqa: N815
    arrayValue: Any = None  # noqa: N815


class Attribute(msgspec.Struct):
    """A key and its value."""

    key: str
    value: Value = msgspec.field(default_factory=Value)


class Status(msgspec.Struct):
    """2 or "STATUS_CODE_ERROR" is an error."""

    code: int | str = 0


class Span(msgspec.Struct):
    """What is read of a span."""

    startTimeUnixNano: Moment  # noqa: N815
    endTimeUnixNano: Moment | None = None  # noqa: N815
    traceId: str = ""  # noqa: N815
    spanId: str | None = None  # noqa: N815
    attributes: list[Attribute] = []
    status: Status | None = None


class Scope(msgspec.Struct):
    """Spans of one library."""

    spans: list[Span] = []


class Resource(msgspec.Struct):
    """Spans of one service."""

    scopeSpans: list[Scope] = []  # noqa: N815


class Row(msgspec.Struct):
    """A document or line."""

    resourceSpans: list[Resource]  # noqa: N815


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches with lengths, times, kind and outcome of every model call."""
    gather = Gather(_COLUMNS, intake.metadata("otel", "unix"))
    ids = Ids(intake, "spanId")
    number = others = 0
    for _, document in jsonrows.read(source, intake, Row):
        for span in (span for part in document.resourceSpans for scope in part.scopeSpans for span in scope.spans):
            number += 1
            found = {attribute.key: attribute.value for attribute in span.attributes}
            if not _is_request(found):
                others += 1
                continue
            try:
                values = _row(span, found)
            except ValueError as error:
                intake.bad_row(number, "attributes", str(error))
                continue
            if ids.new(number, span.spanId and span.traceId + span.spanId):
                gather.add(*values)
            if gather.full:
                yield gather.take()
    yield from gather.rest()
    if others:
        intake.note(f"{others} spans that are no model call left out")


def _is_request(found: dict[str, Value]) -> bool:
    operation = found.get("gen_ai.operation.name")
    if operation is not None:
        return operation.stringValue in _ENDPOINTS
    return any(name in found for name in (*_INPUT, *_MODEL))


def _row(span: Span, found: dict[str, Value]) -> tuple[object, ...]:
    operation = _text(found, ("gen_ai.operation.name",))
    end = None if span.endTimeUnixNano is None else span.endTimeUnixNano - span.startTimeUnixNano
    if end is not None and end < 0:
        raise ValueError("endTimeUnixNano is before startTimeUnixNano")
    status, outcome, error = _outcome(span, found)
    tokens = _count(found, _INPUT)
    first = _seconds(found, _FIRST_S)
    stream = found.get("gen_ai.request.stream") or found.get("llm.is_streaming")
    return (
        span.spanId,
        _text(found, ("gen_ai.conversation.id", "session.id")),
        span.startTimeUnixNano,
        _text(found, _MODEL),
        _ENDPOINTS.get(operation or ""),
        stream.boolValue if stream is not None else None,
        _count(found, ("gen_ai.request.max_tokens",)),
        _count(found, ("gen_ai.request.choice.count", "gen_ai.request.n")),
        tokens,
        _count(found, _OUTPUT),
        _count(found, _CACHED),
        _count(found, _REASONING),
        None if tokens is None else "usage",
        first,
        end,
        _seconds(found, ("gen_ai.latency.time_in_queue",)),
        _seconds(found, ("gen_ai.latency.time_in_model_prefill",)),
        status,
        outcome,
        _finish(found),
        error,
    )


def _outcome(span: Span, found: dict[str, Value]) -> tuple[int | None, str | None, str | None]:
    status = _count(found, ("http.response.status_code", "http.status_code"))
    if status is not None and not 100 <= status <= 599:
        raise ValueError(f"http.response.status_code {status} is no HTTP status")
    kind = _text(found, ("error.type",))
    broken = span.status is not None and str(span.status.code) in {"2", "STATUS_CODE_ERROR"}
    if status is not None and status >= 400:
        return status, "http_error", f"http {status}"
    if kind is not None and kind.isdigit() and 100 <= int(kind) <= 599:
        return int(kind), "http_error", f"http {kind}"
    if kind is not None and "timeout" in kind.lower():
        return status, "timeout_total", "timeout"
    if kind is not None or broken:
        return status, "stream_error", "stream"
    return status, None, None


def _finish(found: dict[str, Value]) -> str | None:
    value = found.get("gen_ai.response.finish_reasons")
    if value is None:
        return None
    listed = (value.arrayValue or {}).get("values") if isinstance(value.arrayValue, dict) else None
    reason = listed[0].get("stringValue") if listed and isinstance(listed[0], dict) else value.stringValue
    return reason if isinstance(reason, str) and len(reason) < 40 else None


def _text(found: dict[str, Value], names: tuple[str, ...]) -> str | None:
    return next((found[name].stringValue for name in names if name in found and found[name].stringValue), None)


def _count(found: dict[str, Value], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = found.get(name)
        if value is None:
            continue
        number = value.intValue if value.intValue is not None else value.doubleValue
        if number is None:
            continue
        try:
            return one_count(str(number))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return None


def _seconds(found: dict[str, Value], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = found.get(name)
        number = None if value is None else value.doubleValue if value.doubleValue is not None else value.intValue
        if number is not None:
            duration = exact_ns(Decimal(number), NS_PER_S)
            if duration is not None and duration < 0:
                raise ValueError(f"{name} {number} is below 0")
            return duration
    return None
