"""mitmproxy's flow dumps (`mitmdump -w`), of every format version that the installed mitmproxy reads.

Only HTTP flows are requests; TCP, UDP, DNS flows and CONNECT are left out and counted. Time zero is when the whole
request had reached the proxy. A dump keeps the times of a response's head and end, not those of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa

from traces.errors import BadFile
from traces.importers import exchange
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import exact_ns
from traces.importers.source import Source
from traces.meter import End
from traces.units import NS_PER_S


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of requests with lengths, outcome, and the times of head and end."""
    from mitmproxy import http

    gather = Gather(exchange.COLUMNS, intake.metadata("mitm", "unix"))
    ids = Ids(intake, "id")
    others = 0
    for number, flow in enumerate(_flows(source, intake), 1):
        if not isinstance(flow, http.HTTPFlow) or flow.request.method == "CONNECT":
            others += 1
            continue
        if not flow.request.timestamp_start:
            intake.bad_row(number, "timestamp_start", "is missing: a request needs a time")
            continue
        if ids.new(number, flow.id):
            gather.add(*_row(flow))
        if gather.full:
            yield gather.take()
    yield from gather.rest()
    if others:
        intake.note(f"{others} flows that are no HTTP request left out")


def _flows(source: Source, intake: Intake) -> Iterator[Any]:
    from mitmproxy import exceptions, io

    seen = 0
    with source.open() as stream:
        try:
            for flow in io.FlowReader(stream).stream():
                seen += 1
                yield flow
        except (exceptions.FlowReadException, ValueError, TypeError, KeyError, AttributeError) as error:
            if seen == 0:
                raise BadFile(f"{source.name}: not a mitmproxy dump that this mitmproxy reads ({error})") from error
            intake.bad_row(seen + 1, None, "the flow is damaged or cut short; nothing after it can be read")


def _row(flow: Any) -> tuple[object, ...]:
    zero = flow.request.timestamp_end or flow.request.timestamp_start
    request = exchange.Request(
        _ns(zero), flow.request.path, _headers(flow.request), flow.request.raw_content or b"", flow.id
    )
    response, error = flow.response, (flow.error.msg.lower() if flow.error else "")
    end: End = "eof"
    if error:
        end = "client_abort" if "client" in error and ("disconnect" in error or "clos" in error) else "closed"
        end = "connect_error" if response is None and end == "closed" else end
    if response is None:
        gave_up = flow.error.timestamp if flow.error else None
        return exchange.row(
            request, exchange.Response(None, end_ns=_after(zero, gave_up), end=end if error else "closed")
        )
    return exchange.row(
        request,
        exchange.Response(
            response.status_code,
            _headers(response),
            response.raw_content or b"",
            _after(zero, response.timestamp_start),
            _after(zero, response.timestamp_end or (flow.error.timestamp if flow.error else None)),
            end,
        ),
    )


def _headers(message: Any) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in message.headers.items(multi=True)]


def _ns(seconds: float) -> int:
    return exact_ns(Decimal(repr(seconds)), NS_PER_S) or 0


def _after(zero: float, moment: float | None) -> int | None:
    return None if moment is None else max(0, _ns(moment) - _ns(zero))
