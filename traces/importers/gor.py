"""GoReplay's `.gor` files: records divided by a line of three monkeys.

A record begins with `TYPE ID TIMESTAMP [LATENCY]` (ns); type 1 is a request, 2 the original response, 3 the replayed
one (not read). The raw HTTP message follows. Requests are given in file order; each waits for its response, but no
more than `_WAITING` at a time, so that a file without responses streams.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from traces.errors import BadFile
from traces.importers import exchange
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.source import Source
from traces.meter import End

_DIVIDER = "\n🐵🙈🙉\n".encode()
_PIECE_BYTES = 1 << 20
_WAITING = 4096
_METHODS = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ", b"OPTIONS ")


class Record(NamedTuple):
    """A request or response as it stands in the file."""

    row: int
    kind: str
    id: str
    at_ns: int
    latency_ns: int | None
    message: bytes


class _Pending:
    """A request and the response that came for it, if one did."""

    def __init__(self, request: Record) -> None:
        self.request = request
        self.response: Record | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of requests with what their responses, if recorded, tell."""
    gather = Gather(exchange.COLUMNS, intake.metadata("gor", "unix"))
    for request, response in _paired(source, intake):
        gather.add(*_values(request, response))
        if gather.full:
            yield gather.take()
    yield from gather.rest()


def _paired(source: Source, intake: Intake) -> Iterator[tuple[Record, Record | None]]:
    ids = Ids(intake, "id")
    waiting: deque[_Pending] = deque()
    by_id: dict[str, _Pending] = {}
    orphans = 0
    for record in _records(source, intake):
        if record.kind == "1" and ids.new(record.row, record.id):
            pending = by_id[record.id] = _Pending(record)
            waiting.append(pending)
        elif record.kind == "2":
            if record.id in by_id:
                by_id[record.id].response = record
            else:
                orphans += 1
        while waiting and (waiting[0].response is not None or len(waiting) > _WAITING):
            done = waiting.popleft()
            del by_id[done.request.id]
            yield done.request, done.response
    for done in waiting:
        yield done.request, done.response
    if orphans:
        intake.note(f"{orphans} responses without their request left out")


def _records(source: Source, intake: Intake) -> Iterator[Record]:
    row = 0
    for chunk in _divided(source):
        if not chunk.strip():
            continue
        row += 1
        head, _, message = chunk.partition(b"\n")
        fields = head.split()
        if len(fields) not in {3, 4} or fields[0] not in {b"1", b"2", b"3"}:
            if row == 1:
                raise BadFile(f"{source.name}: not a .gor file: its first line is not TYPE ID TIMESTAMP")
            intake.bad_row(row, None, "does not begin with TYPE ID TIMESTAMP")
            continue
        numbers = [field.decode("ascii", "replace") for field in fields[2:]]
        if not all(number.isdigit() and int(number) < 2**63 for number in numbers):
            intake.bad_row(row, "timestamp", f"{numbers[0][:40]!r} is not a time in ns")
            continue
        if fields[0] == b"1" and not (message.startswith(_METHODS) and b"\r\n\r\n" in message):
            intake.bad_row(row, "request", "is no HTTP request (cut short?)")
            continue
        latency = int(numbers[1]) if len(numbers) > 1 else None
        yield Record(row, fields[0].decode(), fields[1].decode("ascii", "replace"), int(numbers[0]), latency, message)


def _divided(source: Source) -> Iterator[bytes]:
    rest = b""
    with source.open() as stream:
        while piece := stream.read(_PIECE_BYTES):
            *whole, rest = (rest + piece).split(_DIVIDER)
            yield from whole
    yield rest


def _values(request: Record, response: Record | None) -> tuple[object, ...]:
    start, headers, body = _message(request.message)
    path = start.split(" ")[1] if " " in start else ""
    given = exchange.Request(request.at_ns, path, headers, body, request.id)
    if response is None:
        return exchange.row(given, None)
    start, headers, body = _message(response.message)
    parts = start.split(" ")
    status = int(parts[1]) if len(parts) > 1 and re.fullmatch("[1-9][0-9]{2}", parts[1]) else None
    took = response.latency_ns or max(0, response.at_ns - request.at_ns) or None
    end: End = "eof" if status is not None else "closed"
    return exchange.row(given, exchange.Response(status, headers, body, None, took, end))


def _message(raw: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
    """(start line, headers, body with its chunked framing removed)."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = [
        (name.strip(), value.strip()) for name, colon, value in (line.partition(":") for line in lines[1:]) if colon
    ]
    if any(name.lower() == "transfer-encoding" and "chunked" in value.lower() for name, value in headers):
        body = _unchunked(body)
    return lines[0], headers, body


def _unchunked(body: bytes) -> bytes:
    found: list[bytes] = []
    at = 0
    while (line_end := body.find(b"\r\n", at)) >= 0:
        try:
            size = int(body[at:line_end].split(b";")[0], 16)
        except ValueError:
            return body if not found else b"".join(found)
        if size == 0:
            break
        found.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(found)
