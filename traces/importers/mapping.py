"""`--map arrival=ts_ms,input_tokens=prompt_len`: which column of a foreign table is which column of the record.

The left side is a column of the record; a time may leave its `_ns` away. The right side is the source's column and, for
times, its unit after a colon: `arrival=ts:ms`, `end=latency:s`. Without one the unit is the one in the column's name
(`ts_ms`); for the arrival the magnitude tells as a last resort. A source column that bears the record's own name maps
to itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import BadFile
from traces.importers import tables
from traces.importers.batching import REPEATED, Seen
from traces.importers.clock import UNIT_DIGITS, Clock, Parsed, decimal_ns
from traces.importers.intake import Intake, record_batch
from traces.importers.jsonrows import signed
from traces.record import ENDPOINTS, OUTCOMES, REQUEST_SCHEMA, TOKENS_SOURCES

_UNITS = (*UNIT_DIGITS, "iso")
_NAMED_UNIT = re.compile(r"(?:^|[_ .(\[-])(ns|us|µs|ms|s|sec|seconds)[)\]]?$", re.IGNORECASE)
_ONE_OF = {"endpoint": ENDPOINTS, "outcome": OUTCOMES, "tokens_source": TOKENS_SOURCES}
_NOTHING = np.zeros(0, np.int64)
_TRUE, _FALSE = ("true", "1", "yes", "t"), ("false", "0", "no", "f")


class Column(NamedTuple):
    """One mapped column: record name, source name, and the function from its strings to (values, what was bad)."""

    name: str
    source: str
    parse: Callable[[pa.Array], tuple[object, Parsed]]


def parse(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a `--map` option. Raises ValueError with an example."""
    pairs = []
    for part in text.split(","):
        name, equals, source = (piece.strip() for piece in part.partition("="))
        if not (equals and name and source):
            raise ValueError(f"{part!r} is not COLUMN=SOURCE: write arrival=ts_ms,input_tokens=prompt_len")
        pairs.append((_record_name(name), source))
    return tuple(pairs)


def _record_name(name: str) -> str:
    for candidate in (name, f"{name}_ns"):
        if candidate in REQUEST_SCHEMA.names:
            return candidate
    known = ", ".join(column.removesuffix("_ns") for column in REQUEST_SCHEMA.names)
    raise ValueError(f"{name!r} is no column of a trace: {known}")


def resolve(
    mapping: Sequence[tuple[str, str]], found: Sequence[str], where: str, *, nested: bool = False
) -> tuple[list[Column], Clock]:
    """The mapped columns of a file that has the columns `found`, and the clock of its arrivals.

    Args:
        mapping: pairs (record column, source column[:unit]).
        found: the source's columns.
        where: the file's name, for messages.
        nested: a source column may be a dotted path below a column.

    Raises:
        BadFile: a mapped column is not there, or nothing tells the arrival.
    """
    by_name = {name.lower(): name for name in reversed(found)}
    chosen = {name: _split(source) for name, source in mapping}
    for name in REQUEST_SCHEMA.names:
        if name not in chosen and name in by_name:
            chosen[name] = (name, None)
    listed = tables.listed(found)
    if "arrival_ns" not in chosen:
        raise BadFile(f"{where}: no column is mapped to the arrival: --map arrival=COLUMN (found: {listed})")
    columns, clock = [], Clock()
    for name, (source, given) in chosen.items():
        if source.lower() not in by_name and not (nested and source.split(".")[0].lower() in by_name):
            raise BadFile(f"{where}: column {source!r} is missing (found: {listed})")
        actual = by_name.get(source.lower(), source)
        unit = given or _unit_in(actual)
        if name == "arrival_ns":
            clock = Clock(unit, relative=False if unit == "iso" else None)
            columns.append(Column(name, actual, _arrival(clock)))
        else:
            columns.append(Column(name, actual, _parser(name, actual, unit, where)))
    return columns, clock


def _split(source: str) -> tuple[str, str | None]:
    name, colon, unit = source.rpartition(":")
    return (name, unit.replace("µs", "us")) if colon and name and unit in _UNITS else (source, None)


def _unit_in(source: str) -> str | None:
    match = _NAMED_UNIT.search(source)
    if match is None:
        return None
    unit = match[1].lower()
    return {"sec": "s", "seconds": "s", "µs": "us"}.get(unit, unit)


def _arrival(clock: Clock) -> Callable[[pa.Array], tuple[object, Parsed]]:
    def read(text: pa.Array) -> tuple[object, Parsed]:
        parsed = clock.ns(text)
        return parsed.values, parsed

    return read


def _parser(name: str, source: str, unit: str | None, where: str) -> Callable[[pa.Array], tuple[object, Parsed]]:
    type_ = REQUEST_SCHEMA.field(name).type
    if name.endswith("_ns") and pa.types.is_integer(type_):
        if unit is None:
            raise BadFile(f"{where}: the unit of {source!r} is not known: --map {name.removesuffix('_ns')}={source}:ms")
        return lambda text: _optional(text, lambda given: tables.not_negative(decimal_ns(given, unit)))
    if pa.types.is_integer(type_):
        most = 2 ** (type_.bit_width - 1) - 1
        return lambda text: _optional(text, lambda given: _at_most(tables.counts(given), most))
    if pa.types.is_boolean(type_):
        return _boolean
    if pa.types.is_list(type_):
        return _lists
    if name == "request_id":
        seen = Seen()
        return lambda text: _ids(text, seen)
    allowed = _ONE_OF.get(name)
    return lambda text: _words(text, allowed)


def _words(text: pa.Array, allowed: tuple[str, ...] | None) -> tuple[object, Parsed]:
    """Strings, of a fixed set where the record has one."""
    words = tables.words(text)
    if allowed is None:
        return words, Parsed(_NOTHING, {})
    known = pc.or_(pc.is_in(words, pa.array(allowed)), pc.is_null(words)).to_numpy(zero_copy_only=False)
    return words, Parsed(
        _NOTHING, dict.fromkeys(np.flatnonzero(~known).tolist(), f"is not one of {', '.join(allowed)}")
    )


def _ids(text: pa.Array, seen: Seen) -> tuple[object, Parsed]:
    """Ids, none of which may come twice."""
    words = tables.words(text)
    return words, Parsed(_NOTHING, dict.fromkeys(seen.repeated(words.to_pylist()), REPEATED))


def _optional(text: pa.Array, read: Callable[[pa.Array], Parsed]) -> tuple[object, Parsed]:
    """Numbers where there is text, null where there is none."""
    empty = pc.fill_null(pc.equal(text, ""), fill_value=True)
    parsed = read(pc.if_else(empty, "0", text))
    return pa.array(parsed.values, mask=empty.to_numpy(zero_copy_only=False)), parsed


def _at_most(parsed: Parsed, most: int) -> Parsed:
    for index in np.flatnonzero(parsed.values > most).tolist():
        parsed.bad[index] = f"is more than {most}"
    return parsed


def _boolean(text: pa.Array) -> tuple[object, Parsed]:
    words = pc.utf8_lower(tables.words(text))
    true = pc.is_in(words, pa.array(_TRUE))
    known = pc.or_(true, pc.or_(pc.is_in(words, pa.array(_FALSE)), pc.is_null(words)))
    bad = np.flatnonzero(~known.to_numpy(zero_copy_only=False)).tolist()
    values = pc.if_else(pc.is_null(words), pa.scalar(None, pa.bool_()), true)
    return values, Parsed(_NOTHING, dict.fromkeys(bad, "is neither true nor false"))


def _lists(text: pa.Array) -> tuple[object, Parsed]:
    """Lists of whole numbers, written as JSON."""
    values: list[list[int] | None] = []
    bad: dict[int, str] = {}
    for index, word in enumerate(text.to_pylist()):
        try:
            values.append(signed(msgspec.json.decode(word, type=list[int])) if word else None)
        except (msgspec.MsgspecError, ValueError):
            values.append(None)
            bad[index] = "is not a list of whole numbers"
    return pa.array(values, pa.list_(pa.int64())), Parsed(_NOTHING, bad)


def records(intake: Intake, name: str, columns: Sequence[Column], clock: Clock, rows: tables.Rows) -> pa.RecordBatch:
    """A batch of records from a batch of strings; its bad rows reported and left out.

    Args:
        intake: where bad rows go.
        name: the format, for the metadata.
        columns: what `resolve` found.
        clock: of the arrivals.
        rows: the strings.
    """
    values: dict[str, object] = {}
    parsed: dict[str, Parsed] = {}
    for column in columns:
        label = column.source if column.source == column.name else f"{column.source} ({column.name})"
        values[column.name], parsed[label] = column.parse(rows.columns[column.source])
    intake.note(clock.told())
    return tables.kept(record_batch(values, intake.metadata(name, clock.epoch)), intake, rows, parsed)
