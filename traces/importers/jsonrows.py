"""JSON records, one after the other: JSON lines, or an array of objects read piece by piece.

Each record is decoded straight into the importer's own struct (msgspec), so a missing or wrong field is named; numbers
that are times are decoded as `Decimal` and stay exact. Row numbers count records from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, TypeVar

import msgspec

from traces.errors import BadFile
from traces.importers.intake import Intake
from traces.importers.source import Source

Record = TypeVar("Record")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Moment = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # a time that is a whole number of ns already
_PIECE_BYTES = 1 << 20
_MAX_NS = 2**63 - 1


def read(source: Source, intake: Intake, type_: type[Record]) -> Iterator[tuple[int, Record]]:
    """(row, record) of every record that can be read; the others are bad rows.

    Args:
        source: JSON lines, or one array of objects, or objects that follow each other.
        intake: takes the records that are no JSON or lack a field.
        type_: a msgspec Struct, or `dict`.
    """
    first = source.head(4096).lstrip()[:1]
    if first == b"[":
        yield from _converted(_array(source), intake, type_)
        return
    if first != b"{":
        raise BadFile(f"{source.name}: is not JSON: it does not begin with {{ or [")
    decoder = msgspec.json.Decoder(type_, strict=False)
    row = 0
    for line in source.lines():
        if not line or line.isspace():
            continue
        row += 1
        try:
            yield row, decoder.decode(line)
        except msgspec.ValidationError as error:
            intake.bad_row(row, *explain(error))
        except (msgspec.DecodeError, UnicodeDecodeError):
            intake.bad_row(row, None, "is not a JSON object on one line (cut short?)")


def _converted(values: Iterator[Any], intake: Intake, type_: type[Record]) -> Iterator[tuple[int, Record]]:
    for row, value in enumerate(values, 1):
        try:
            yield row, msgspec.convert(value, type_, strict=False)
        except msgspec.ValidationError as error:
            intake.bad_row(row, *explain(error))


def _array(source: Source) -> Iterator[Any]:
    """Elements of a top-level array, with no more than one element (and 1 MiB) in memory."""
    decoder = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)
    with source.open() as stream:
        text, at, row, size = "", 0, 0, _PIECE_BYTES
        pending = b""
        opened = False
        while True:
            piece = stream.read(size)
            data = pending + piece
            try:
                text, pending = text[at:] + data.decode(), b""
            except UnicodeDecodeError as error:
                if not piece or error.start < len(data) - 4:
                    raise BadFile(f"{source.name}: is not UTF-8 text after record {row}") from error
                text, pending = text[at:] + data[: error.start].decode(), data[error.start :]
            at = 0
            if not opened:
                at, opened = text.index("[") + 1, True
            while True:
                while at < len(text) and text[at] in " \t\r\n,":
                    at += 1
                if at < len(text) and text[at] == "]":
                    return
                try:
                    value, after = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:
                    if not piece:
                        raise BadFile(
                            f"{source.name}: the JSON array is broken or cut short after record {row}"
                        ) from error
                    size = max(
                        _PIECE_BYTES, len(text) - at
                    )  # grow, so that a huge element is not parsed again and again
                    break
                if after == len(text) and piece:
                    break  # a number may go on in the next piece
                row, at, size = row + 1, after, _PIECE_BYTES
                yield value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def explain(error: msgspec.ValidationError) -> tuple[str | None, str]:
    """(field, problem) of a validation error, in plain words."""
    text = str(error)
    problem, _, path = text.partition(" - at `")
    field = path.rstrip("`").removeprefix("$").lstrip(".") or None
    if problem.startswith("Object missing required field"):
        missing = problem.split("`")[1]
        return f"{field}.{missing}" if field else missing, "is missing"
    return field, problem.replace("`", "").replace("Expected", "expected").replace(
        "int >= 0", "a whole number, 0 or more"
    )


def exact_ns(value: Decimal | None, unit_ns: int) -> int | None:
    """A decimal number of a unit in ns, half to even below 1 ns. Raises ValueError where 64 bits do not hold it."""
    if value is None:
        return None
    if not value.is_finite() or value.adjusted() > 20:
        raise ValueError(f"{value} is no time in 64 bits of nanoseconds")
    whole = int((value * unit_ns).to_integral_value())
    if abs(whole) > _MAX_NS:
        raise ValueError(f"{value} is no time in 64 bits of nanoseconds")
    return whole


def timed(intake: Intake, row: int, unit_ns: int, **values: Decimal | None) -> tuple[int | None, ...]:
    """Times of a row in ns, in the order given; all null, and the row a bad one, when one is no time or below 0."""
    try:
        times = tuple(exact_ns(value, unit_ns) for value in values.values())
    except ValueError as error:
        column = next(name for name, value in values.items() if value is not None and str(value) in str(error))
        intake.bad_row(row, column, str(error))
        return (None,) * len(values)
    for name, time_ns in zip(values, times, strict=True):
        if time_ns is not None and time_ns < 0:
            intake.bad_row(row, name, f"{values[name]} is below 0")
            return (None,) * len(values)
    return times
