"""HAR 1.2, as browsers and mitmproxy save it: one JSON document with `log.entries`.

`startedDateTime` is the arrival (any offset), `time` the whole exchange in ms, `timings` its parts: the head was there
after blocked + dns + connect + send + wait (-1 means not applicable). Status 0 is a request that got no answer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated

import msgspec
import pyarrow as pa

from traces.errors import BadFile
from traces.importers import exchange
from traces.importers.batching import Gather
from traces.importers.clock import one_iso_ns
from traces.importers.intake import Intake
from traces.importers.jsonrows import exact_ns, explain
from traces.importers.source import Source
from traces.units import NS_PER_MS


class Pair(msgspec.Struct):
    """A header."""

    name: str
    value: str = ""


class Body(msgspec.Struct):
    """A request's body."""

    text: str | None = None


class Content(msgspec.Struct):
    """A response's body, decoded by whoever wrote the file."""

    text: str | None = None
    encoding: str | None = None
    mimeType: str | None = None  # noqa: N815 - HAR's spelling


class Request(msgspec.Struct):
    """What was asked."""

    url: str
    headers: list[Pair] = []
    postData: Body | None = None  # noqa: N815


class Response(msgspec.Struct):
    """What came back."""

    status: Annotated[int, msgspec.Meta(ge=0, le=999)]
    headers: list[Pair] = []
    content: Content = msgspec.field(default_factory=Content)


class Timings(msgspec.Struct):
    """Parts of the time in ms; -1 where one does not apply."""

    blocked: Decimal | None = None
    dns: Decimal | None = None
    connect: Decimal | None = None
    send: Decimal | None = None
    wait: Decimal | None = None


class Entry(msgspec.Struct):
    """An exchange."""

    startedDateTime: str  # noqa: N815
    request: Request
    response: Response
    time: Decimal | None = None
    timings: Timings | None = None


class Log(msgspec.Struct):
    """The list of them, each decoded on its own."""

    entries: list[msgspec.Raw]


class Document(msgspec.Struct):
    """The file."""

    log: Log


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of requests with lengths, outcome and times as far as HAR has them."""
    with source.open() as stream:
        data = stream.read()
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        column, problem = explain(error)
        raise BadFile(f"{source.name}: not a HAR file ({column or 'document'} {problem})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{source.name}: not a complete JSON document ({error})") from error
    gather = Gather(exchange.COLUMNS, intake.metadata("har", "unix"))
    decoder = msgspec.json.Decoder(Entry, strict=False)
    for number, raw in enumerate(document.log.entries, 1):
        try:
            gather.add(*_row(decoder.decode(raw)))
        except msgspec.ValidationError as error:
            intake.bad_row(number, *explain(error))
        except (ValueError, ArithmeticError) as error:
            intake.bad_row(number, "startedDateTime", str(error))
        if gather.full:
            yield gather.take()
    yield from gather.rest()


def _row(entry: Entry) -> tuple[object, ...]:
    body = (entry.request.postData.text or "") if entry.request.postData else ""
    request = exchange.Request(
        one_iso_ns(entry.startedDateTime), entry.request.url, _pairs(entry.request.headers), body.encode()
    )
    total = _known(entry.time)
    if entry.response.status == 0:
        return exchange.row(request, exchange.Response(None, end_ns=_ms(total), end="connect_error"))
    # the body is decoded already: a content-encoding header would decode it again
    headers = [pair for pair in _pairs(entry.response.headers) if pair[0].lower() != "content-encoding"]
    response = exchange.Response(
        entry.response.status, headers, _content(entry.response), _ms(_head(entry.timings, total)), _ms(total)
    )
    return exchange.row(request, response)


def _head(timings: Timings | None, total: Decimal | None) -> Decimal | None:
    """When the response's head began to come, in ms; not after the end, whatever rounding made of the parts."""
    if timings is None:
        return None
    parts = (timings.blocked, timings.dns, timings.connect, timings.send, timings.wait)
    head = sum((part for part in parts if part is not None and part >= 0), Decimal(0))
    return head if total is None else min(head, total)


def _pairs(headers: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.name, pair.value) for pair in headers]


def _content(response: Response) -> bytes:
    text = response.content.text or ""
    if response.content.encoding != "base64":
        return text.encode()
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError):
        return b""


def _known(value: Decimal | None) -> Decimal | None:
    return value if value is not None and value >= 0 else None


def _ms(value: Decimal | None) -> int | None:
    return exact_ns(value, NS_PER_MS)
