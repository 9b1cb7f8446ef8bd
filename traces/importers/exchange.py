"""A recorded HTTP exchange as a record: what was asked from the request, lengths and times from the response, no text.

Recordings keep a body whole: when its pieces came is lost. So a stream's token times are null here, never the time of
the whole; lengths, outcome and the ends of head and body stand as measured. The response is read by the meter that
capture and replay use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from traces.meter import End, Measured, Meter
from traces.wire.asked import asked

COLUMNS = (
    "request_id tenant arrival_ns model endpoint stream max_tokens n tools input_tokens output_tokens cached_tokens "
    "reasoning_tokens tokens_source headers_ns end_ns status outcome finish_reason error request_bytes response_bytes"
)
TENANT_HEADER = "x-tenant"

Headers = Iterable[tuple[str, str]]


class Request(NamedTuple):
    """What was sent, and when."""

    arrival_ns: int
    path: str
    headers: Headers
    body: bytes
    request_id: str | None = None
    tenant: str | None = None


class Response(NamedTuple):
    """What came back; `headers_ns` and `end_ns` are offsets from the request, null where the recording has no times."""

    status: int | None = None  # None: no answer came
    headers: Headers = ()
    body: bytes = b""
    headers_ns: int | None = None
    end_ns: int | None = None
    end: End = "eof"


def row(request: Request, response: Response | None) -> tuple[object, ...]:
    """The values of `COLUMNS`. A response of None was not recorded, which says nothing about how it ended."""
    want = asked(request.path, request.body)
    tenant = request.tenant or next((value for name, value in request.headers if name.lower() == TENANT_HEADER), None)
    measured = None if response is None else _measure(want.endpoint, want.stream, want.n, want.max_tokens, response)
    seen = measured or Measured(response_bytes=0)
    return (
        request.request_id,
        tenant,
        request.arrival_ns,
        want.model,
        want.endpoint,
        want.stream,
        want.max_tokens,
        want.n,
        want.tools,
        seen.input_tokens,
        seen.output_tokens,
        seen.cached_tokens,
        seen.reasoning_tokens,
        seen.tokens_source,
        None if response is None else response.headers_ns,
        None if response is None else response.end_ns,
        seen.status,
        None if measured is None else measured.outcome,
        seen.finish_reason,
        seen.error,
        len(request.body),
        None if measured is None else measured.response_bytes,
    )


def _measure(endpoint: str, stream: bool | None, n: int | None, max_tokens: int | None, response: Response) -> Measured:
    if endpoint == "other":
        return _web(response)
    meter = Meter(endpoint=endpoint, stream=bool(stream), n=n or 1, start_ns=0, chunks="none", max_tokens=max_tokens)
    if response.status is not None:
        meter.head(0, response.status, response.headers)
        meter.feed(0, response.body)
    return meter.close(0, response.end)


def _web(response: Response) -> Measured:
    """An answer that is not an LLM's: no tokens to look for."""
    status, end = response.status, response.end
    outcome: str = end
    error: str | None = None if end == "client_abort" else end.partition("_")[0]
    if end in {"closed", "reset"} or (end == "eof" and status is None):
        outcome = "truncated"
    elif end == "eof" and status is not None:
        fine = 200 <= status < 300
        outcome, error = ("ok", None) if fine else ("http_error", f"http {status}")
    return Measured(status=status, outcome=outcome, error=error, response_bytes=len(response.body))
