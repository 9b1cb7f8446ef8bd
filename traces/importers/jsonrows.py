"""JSON records, one after the other: JSON lines, or an array of objects read piece by piece.

Each record is decoded straight into the importer's own struct (msgspec), so a missing or wrong field is named; numbers
that are times are decoded as `Decimal` and stay exact. Row numbers count records from 1.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, TypeVar

import msgspec

from traces.errors import BadFile
from traces.importers.intake import Intake
from traces.importers.source import Source

Record = TypeVar("Record")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Moment = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # a time that is a whole number of ns already
_PIECE = 1 << 20  # characters
_BETWEEN = re.compile(r"[\s,]*")
_MAX_NS = 2**63 - 1


def read(
    source: Source, intake: Intake, type_: type[Record], *, within: str | None = None
) -> Iterator[tuple[int, Record]]:
    """(row, record) of every record that can be read; the others are bad rows.

    Args:
        source: JSON lines, an array of objects, or objects written over many lines each.
        intake: takes the records that are no JSON or lack a field.
        type_: a msgspec Struct, or `dict`.
        within: the records may also stand in an array under this key of one object, as a page of an API gives them.
    """
    decoder = msgspec.json.Decoder(type_, strict=False)
    for row, text in enumerate(_texts(source, within), 1):
        try:
            yield row, decoder.decode(text)
        except msgspec.ValidationError as error:
            intake.bad_row(row, *explain(error))
        except (msgspec.DecodeError, UnicodeDecodeError):
            intake.bad_row(row, None, "is not a JSON object on one line (cut short?)")


def _texts(source: Source, within: str | None) -> Iterator[bytes]:
    """The JSON text of one record after the other."""
    head = source.head().lstrip()
    page = re.match(rb'\{[^\[\]{}]*"' + (within or "").encode() + rb'"\s*:\s*\[', head) if within else None
    if page is not None:
        yield from _values(source, page[0].count(b"["), closed_by="]")
    elif head.startswith(b"["):
        yield from _values(source, 1, closed_by="]")
    elif not head.startswith(b"{"):
        raise BadFile(f"{source.name}: is not JSON: it does not begin with {{ or [")
    elif head.splitlines()[0].rstrip().endswith((b"{", b"[", b",", b":")):  # one object over many lines
        yield from _values(source, 0, closed_by="")
    else:
        yield from (line for line in source.lines() if line and not line.isspace())


def _values(source: Source, brackets: int, *, closed_by: str) -> Iterator[bytes]:
    """JSON values of an array, or one after the other, with little more than one of them in memory.

    Args:
        source: the file.
        brackets: opening square brackets to skip first.
        closed_by: what ends the values, "" for the end of the file.
    """
    find = json.JSONDecoder().raw_decode
    with source.open() as stream:
        pieces = io.TextIOWrapper(stream, "utf-8", newline="")
        text, at, count, size = "", 0, 0, _PIECE
        while True:
            try:
                piece = pieces.read(size)
            except (UnicodeDecodeError, ValueError) as error:
                raise BadFile(f"{source.name}: is not UTF-8 text after record {count}") from error
            text, at = text[at:] + piece, 0
            while brackets and (found := text.find("[", at)) >= 0:
                at, brackets = found + 1, brackets - 1
            while not brackets:
                between = _BETWEEN.match(text, at)
                at = between.end() if between else at
                if (closed_by and text.startswith(closed_by, at)) or (not piece and at == len(text) and not closed_by):
                    return
                try:
                    _, after = find(text, at)
                except (json.JSONDecodeError, RecursionError):
                    break
                if after == len(text) and piece:
                    break  # a number may go on in the next piece
                yield text[at:after].encode()
                at, count, size = after, count + 1, _PIECE
            if not piece:
                raise BadFile(f"{source.name}: the JSON is broken or cut short after record {count}")
            size = max(_PIECE, len(text) - at)  # so that a huge value is not looked at again and again


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


def signed(hashes: Sequence[int] | None) -> list[int] | None:
    """Block ids of up to 64 bits, signed or not, as signed ones. Raises ValueError for longer ones."""
    if not hashes:
        return None if hashes is None else []
    if max(hashes) < 2**63 and min(hashes) >= -(2**63):
        return list(hashes)
    if max(hashes) >= 2**64 or min(hashes) < -(2**63):
        raise ValueError("a block id has more than 64 bits")
    return [number - 2**64 if number >= 2**63 else number for number in hashes]


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
