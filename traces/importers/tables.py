"""CSV in bulk: named columns as strings, batch by batch, with the number of every data row known.

The header is read here, so that a missing column is named and names match whatever their case and surrounding spaces.
Values stay strings until the importer says what they are: nothing is inferred from the first rows. A row with too few
or too many fields is a bad row of its own.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from traces.errors import BadFile
from traces.importers.clock import Parsed, decimal_of, each
from traces.importers.intake import Intake
from traces.importers.source import Source

_BLOCK_BYTES = 4 << 20
_MAX_COUNT = 2**31 - 1


class Rows(NamedTuple):
    """A batch of a table: string columns by the name asked for, and the data row number of each row."""

    columns: dict[str, pa.Array]
    numbers: Callable[[int], int]  # index in the batch → data row, from 1

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def header(line: bytes, delimiter: str = ",") -> list[str]:
    """Column names of a header line, stripped of spaces and quotes; none when it is no such line."""
    try:
        names = next(csv.reader([line.decode("utf-8", "replace")], delimiter=delimiter), [])
    except csv.Error:
        return []
    return [name.strip() for name in names]


def read(
    source: Source,
    intake: Intake,
    wanted: Sequence[str],
    optional: Sequence[str] = (),
    *,
    delimiter: str = ",",
) -> Iterator[Rows]:
    """Batches of the columns `wanted`, which must be there, and of those of `optional` that are.

    Args:
        source: the CSV file.
        intake: takes the rows whose number of fields is wrong.
        wanted: column names that must be in the header.
        optional: names that may be.
        delimiter: between the fields.

    Raises:
        BadFile: a column of `wanted` is missing, or the file is not CSV.
    """
    with source.open() as stream:
        found = _take_header(stream, source, delimiter)
        at = _positions(found)
        for name in wanted:
            if name.lower() not in at:
                raise BadFile(f"{source.name}: column {name!r} is missing (found: {listed(found)})")
            if sum(other.lower() == name.lower() for other in found) > 1:
                raise BadFile(f"{source.name}: column {name!r} is there twice")
        present = [name for name in (*wanted, *optional) if name.lower() in at]
        keys = {name: f"c{at[name.lower()]}" for name in present}
        try:
            reader, odd = _reader(_Checked(stream, source.name), len(found), keys, delimiter)
        except pa.ArrowInvalid as error:
            raise BadFile(f"{source.name}: not CSV ({_reason(error)})") from error
        if reader is not None:
            yield from _batches(reader, odd, intake, keys)


def _take_header(stream: BinaryIO, source: Source, delimiter: str) -> list[str]:
    for line in stream:
        if b"\0" in line:
            raise BadFile(f"{source.name}: is not text")
        if b"\r" in line.rstrip(b"\r\n"):
            raise BadFile(f"{source.name}: lines end in CR alone; save it with LF or CRLF")
        if line.strip():
            return header(line, delimiter)
    raise BadFile(f"{source.name}: has no header line")


def listed(found: Sequence[str]) -> str:
    """Column names for a message: the first dozen, shortened, printable."""
    shown = ("".join(mark if mark.isprintable() else "?" for mark in name[:40]) for name in found[:12])
    return ", ".join(shown) or "none"


def _positions(found: Sequence[str]) -> dict[str, int]:
    at: dict[str, int] = {}
    for position, name in enumerate(found):
        at.setdefault(name.lower(), position)
    return at


def _batches(
    reader: pacsv.CSVStreamingReader, odd: list[tuple[int, str]], intake: Intake, keys: dict[str, str]
) -> Iterator[Rows]:
    taken, reported = 0, 0
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            batch = None
        except pa.ArrowInvalid as error:
            raise BadFile(f"{intake.source}: not CSV from about row {taken + 1} on ({_reason(error)})") from error
        for row, problem in odd[reported:]:
            intake.bad_row(row, None, problem)
        reported = len(odd)
        if batch is None:
            return
        if batch.num_rows:
            yield Rows({name: batch.column(key) for name, key in keys.items()}, _Numbers(taken, odd))
        taken += batch.num_rows


def _reader(
    stream: io.RawIOBase, width: int, keys: dict[str, str], delimiter: str
) -> tuple[pacsv.CSVStreamingReader | None, list[tuple[int, str]]]:
    """Arrow's reader (None when no data follows), and where it puts rows with the wrong number of fields."""
    odd: list[tuple[int, str]] = []  # (data row, problem)

    def wrong_width(row: pacsv.InvalidRow) -> str:
        odd.append((row.number or 0, f"{row.actual_columns} fields where the header has {row.expected_columns}"))
        return "skip"

    try:
        reader = pacsv.open_csv(
            stream,
            read_options=pacsv.ReadOptions(
                use_threads=False, block_size=_BLOCK_BYTES, column_names=[f"c{index}" for index in range(width)]
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=wrong_width
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(keys.values(), pa.string()),
                include_columns=list(dict.fromkeys(keys.values())),
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            return None, odd
        raise
    return reader, odd


class _Checked(io.RawIOBase):
    """Bytes that are UTF-8; Arrow would trip over others in the rows that it hands back."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        super().__init__()
        self._stream, self._name = stream, name
        self._check = codecs.getincrementaldecoder("utf-8")().decode

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        try:
            self._check(data, final=not data)
        except UnicodeDecodeError as error:
            raise BadFile(f"{self._name}: is not UTF-8 text") from error
        buffer[: len(data)] = data
        return len(data)


class _Numbers:
    """Data row of the index-th row of a batch: rows left out before it count too."""

    def __init__(self, before: int, odd: list[tuple[int, str]]) -> None:
        self._before, self._odd = before, odd

    def __call__(self, index: int) -> int:
        row = self._before + index + 1
        for left_out, _ in sorted(self._odd):
            if left_out > row:
                break
            row += 1
        return row


def _reason(error: Exception) -> str:
    return "a line longer than 4 MiB, or a quote that does not end" if "straddling" in str(error) else _first(error)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or ["unreadable"])[0][:100]


def counts(text: pa.Array) -> Parsed:
    """Non-negative whole numbers below 2^31 of a string array (`12`, also `12.0` and `1.2e1`)."""
    try:
        if not text.null_count and not pc.any(pc.match_substring(text, "x", ignore_case=True)).as_py():  # 0x10 is no 16
            values = pc.cast(text, pa.int64()).to_numpy(zero_copy_only=False)
            if not values.size or (values.min() >= 0 and values.max() <= _MAX_COUNT):
                return Parsed(values, {})
    except pa.ArrowInvalid:
        pass
    return each(text, one_count)


def one_count(word: str) -> int:
    """One count of tokens. Raises ValueError saying what is wrong with it."""
    shown = repr(word.strip()[:40])
    try:
        value = decimal_of(word)
    except ValueError:
        raise ValueError(f"{shown} is not a whole number") from None
    if value < 0:
        raise ValueError(f"{shown} is below 0")
    if value > _MAX_COUNT:
        raise ValueError(f"{shown} is more than 2^31 - 1")
    if value != value.to_integral_value():
        raise ValueError(f"{shown} is not a whole number")
    return int(value)


def kept(batch: pa.RecordBatch, intake: Intake, rows: Rows, parsed: dict[str, Parsed]) -> pa.RecordBatch:
    """The rows of a batch in which every value could be read; the others are reported in file order.

    Args:
        batch: what was made of `rows`.
        intake: where bad rows go.
        rows: the batch as it was read, for its row numbers.
        parsed: column of the source → what was read from it.
    """
    problems: dict[int, tuple[str, str]] = {}
    for column, (_, bad) in parsed.items():
        for index, problem in bad.items():
            problems.setdefault(index, (column, problem))
    if not problems:
        return batch
    for index in sorted(problems):
        intake.bad_row(rows.numbers(index), *problems[index])
    keep = np.ones(batch.num_rows, bool)
    keep[list(problems)] = False
    return batch.filter(pa.array(keep))


def words(text: pa.Array) -> pa.Array:
    """Strings with their surrounding spaces removed; empty ones are null."""
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def not_negative(parsed: Parsed) -> Parsed:
    """The same, with values below 0 marked as bad."""
    for index in np.flatnonzero(parsed.values < 0).tolist():
        parsed.bad.setdefault(index, "is below 0")
    return parsed
