"""AREX recordings exported as JSON lines or an array: one object a recorded call.

A service's incoming HTTP call is a row; so is an outgoing one to an LLM (category `HttpClient`, path of an LLM
endpoint). Other dependencies (databases, caches) and replays (`replayId` set) are left out and counted. `creationTime`
is epoch ms, the only time there is: the response's times are null. The application is the tenant.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from traces.importers import exchange, jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import Moment
from traces.importers.source import Source
from traces.units import NS_PER_MS
from traces.wire.asked import endpoint_of

_ENTRY_POINTS = {"Servlet", "NettyProvider", "DubboProvider", "QMessageConsumer"}
_HTTP_ENTRY_POINTS = {"Servlet", "NettyProvider"}


class Category(msgspec.Struct):
    """What kind of call it was."""

    name: str
    entryPoint: bool | None = None  # noqa: N815 - AREX's spelling


class Target(msgspec.Struct):
    """Request or response."""

    body: str | None = None
    attributes: dict[str, Any] | None = None


class Row(msgspec.Struct):
    """A recorded call."""

    categoryType: Category  # noqa: N815
    creationTime: Moment  # noqa: N815
    id: str | None = None
    replayId: str | None = None  # noqa: N815
    appId: str | None = None  # noqa: N815
    operationName: str | None = None  # noqa: N815
    targetRequest: Target | None = None  # noqa: N815
    targetResponse: Target | None = None  # noqa: N815


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of incoming calls and outgoing LLM calls."""
    gather = Gather(exchange.COLUMNS, intake.metadata("arex", "unix"))
    ids = Ids(intake, "id")
    replays = others = 0
    for number, row in jsonrows.read(source, intake, Row):
        if row.replayId:
            replays += 1
            continue
        if not _is_call(row):
            others += 1
            continue
        if row.creationTime >= 2**63 // NS_PER_MS:
            intake.bad_row(number, "creationTime", f"{row.creationTime} is no epoch time in ms")
            continue
        if ids.new(number, row.id):
            gather.add(*_row(row))
        if gather.full:
            yield gather.take()
    yield from gather.rest()
    for count, what in ((replays, "replayed calls"), (others, "calls that are neither incoming HTTP nor to an LLM")):
        if count:
            intake.note(f"{count} {what} left out")


def _path(row: Row) -> str:
    attributes = (row.targetRequest.attributes if row.targetRequest else None) or {}
    return str(attributes.get("RequestPath") or row.operationName or "")


def _is_call(row: Row) -> bool:
    name = row.categoryType.name
    if name in _ENTRY_POINTS:
        return name in _HTTP_ENTRY_POINTS
    return "HttpClient" in name and endpoint_of(_path(row)) is not None


def _row(row: Row) -> tuple[object, ...]:
    target = row.targetRequest or Target()
    request = exchange.Request(
        row.creationTime * NS_PER_MS, _path(row), _headers(target), _body(target.body), row.id, row.appId or None
    )
    if row.targetResponse is None or row.targetResponse.body is None:
        return exchange.row(request, None)
    answer = row.targetResponse
    headers = [pair for pair in _headers(answer) if pair[0].lower() != "content-encoding"]  # stored decoded
    return exchange.row(request, exchange.Response(_status(answer), headers, _body(answer.body)))


def _status(answer: Target) -> int:
    for name in ("StatusCode", "statusCode", "status"):
        value = str((answer.attributes or {}).get(name, ""))
        if value.isdigit() and 100 <= int(value) <= 599:
            return int(value)
    return 200


def _headers(target: Target) -> list[tuple[str, str]]:
    headers = (target.attributes or {}).get("Headers")
    if not isinstance(headers, dict):
        return []
    return [(str(name), str(value)) for name, value in headers.items()]


def _body(text: str | None) -> bytes:
    """Plain JSON or event stream as it stands, else base64, else the text."""
    if not text:
        return b""
    if text.lstrip()[:1] in {"{", "["} or text.startswith(("data:", "event:", ":")):
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()
