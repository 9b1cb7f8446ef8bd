"""Any CSV with a header line, its columns named by `--map`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from traces.errors import BadFile
from traces.importers import mapping, tables
from traces.importers.intake import Intake
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
        yield mapping.records(intake, "csv", columns, clock, rows)
