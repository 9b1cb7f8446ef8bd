"""LiteLLM's spend logs as its API and database give them: `request_id`, `startTime`, `endTime`, `prompt_tokens`, ...

JSON lines, an array, or a page `{"data": [...]}`. `completionStartTime` is the first token of a stream; for an answer
that is not streamed LiteLLM sets it to `endTime`, so it counts only when it is earlier. The team is the tenant. Keys,
users, messages and responses are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.clock import one_iso_ns
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count
from traces.importers.source import Source

_COLUMNS = (
    "request_id session_id tenant arrival_ns model endpoint stream input_tokens output_tokens cached_tokens "
    "tokens_source first_token_ns end_ns outcome error"
)
_ENDPOINTS = (
    ("embedding", "embeddings"),
    ("rerank", "rerank"),
    ("responses", "responses"),
    ("anthropic_messages", "messages"),
    ("text_completion", "completions"),
    ("completion", "chat"),
    ("generate_content", "generate"),
)


class Row(msgspec.Struct):
    """A log entry."""

    startTime: str  # noqa: N815 - LiteLLM's spelling
    prompt_tokens: Count
    completion_tokens: Count
    request_id: str | None = None
    endTime: str | None = None  # noqa: N815
    completionStartTime: str | None = None  # noqa: N815
    model: str | None = None
    call_type: str | None = None
    team_id: str | None = None
    session_id: str | None = None
    status: str | None = None
    metadata: Any = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches with who, what, lengths and the response's times."""
    gather = Gather(_COLUMNS, intake.metadata("litellm", "unix"))
    ids = Ids(intake, "request_id")
    for number, row in jsonrows.read(source, intake, Row, within="data"):
        values = _row(intake, number, row)
        if values is not None and ids.new(number, row.request_id):
            gather.add(*values)
        if gather.full:
            yield gather.take()
    yield from gather.rest()


def _row(intake: Intake, number: int, row: Row) -> tuple[object, ...] | None:
    times: dict[str, int | None] = {}
    for name in ("startTime", "endTime", "completionStartTime"):
        word = getattr(row, name)
        try:
            times[name] = one_iso_ns(word) if word else None
        except ValueError as error:
            intake.bad_row(number, name, str(error))
            return None
    start, end, first = times["startTime"], times["endTime"], times["completionStartTime"]
    if start is None:
        intake.bad_row(number, "startTime", "is empty")
        return None
    if end is not None and end < start:
        intake.bad_row(number, "endTime", "is before startTime")
        return None
    streamed = first is not None and end is not None and start <= first < end
    failed = (row.status or "").lower() == "failure"
    return (
        row.request_id,
        row.session_id or None,
        row.team_id or None,
        start,
        row.model or None,
        _endpoint(row.call_type),
        True if streamed else None,
        row.prompt_tokens,
        row.completion_tokens,
        _cached(row.metadata),
        "usage",
        first - start if streamed and first is not None else None,
        None if end is None else end - start,
        "http_error" if failed else None,
        _error(row.metadata) if failed else None,
    )


def _endpoint(call_type: str | None) -> str | None:
    return next((endpoint for word, endpoint in _ENDPOINTS if word in call_type), "other") if call_type else None


def _cached(metadata: Any) -> int | None:
    values = _under(metadata, "additional_usage_values")
    usage = _under(metadata, "usage_object")
    for found in (values.get("cache_read_input_tokens"), _under(usage, "prompt_tokens_details").get("cached_tokens")):
        if isinstance(found, int) and found >= 0:
            return found
    return None


def _error(metadata: Any) -> str:
    code = _under(metadata, "error_information").get("error_code")
    return f"http {code}" if re.fullmatch("[1-9][0-9]{2}", str(code)) else "http"


def _under(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, str):  # the database's JSON column, exported as text
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return {}
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
