"""Any CSV with a header line, its columns named by `--map`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from traces.errors import BadFile
from traces.importers import mapping, tables
from traces.importers.clock import Clock
from traces.importers.intake import Intake, record_batch
from traces.importers.source import Source


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of the mapped columns."""
    line = next((line for line in source.lines() if line.strip()), b"")
    delimiter = max(",;\t", key=lambda mark: line.decode("utf-8", "replace").count(mark))
    found = tables.header(line, delimiter)
    if not any(found):
        raise BadFile(f"{source.name}: has no header line")
    columns, clock = mapping.resolve(intake.options.mapping, found, source.name)
    wanted = list(dict.fromkeys(column.source for column in columns))
    for rows in tables.read(source, intake, wanted, delimiter=delimiter):
        yield mapped(intake, "csv", columns, clock, rows)


def mapped(intake: Intake, name: str, columns: list[mapping.Column], clock: Clock, rows: tables.Rows) -> pa.RecordBatch:
    """A batch of records from a batch of strings; its bad rows reported and left out."""
    values, parsed = {}, {}
    for column in columns:
        values[column.name], parsed[column.source] = column.parse(rows.columns[column.source])
    intake.note(clock.told())
    return tables.kept(record_batch(values, intake.metadata(name, clock.epoch)), intake, rows, parsed)
