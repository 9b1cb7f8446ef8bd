"""Any Parquet file, its columns named by `--map`. Timestamps of any unit and zone keep every nanosecond.

Columns pass through the same strings as CSV and JSON do, so that units, nulls and bad values mean the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from traces.errors import BadFile
from traces.importers import mapping, tables
from traces.importers.intake import Intake
from traces.importers.source import Source
from traces.record import Metadata

_BATCH_ROWS = 65_536


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of the mapped columns."""
    source.open().close()  # says what is wrong with a folder or an empty file
    try:
        file = pq.ParquetFile(source.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadFile(f"{source.name}: not a complete Parquet file ({str(error).splitlines()[0]})") from error
    with file:
        schema = file.schema_arrow
        columns, clock = mapping.resolve(intake.options.mapping, schema.names, source.name)
        wanted = list(dict.fromkeys(column.source for column in columns))
        moment = next(column.source for column in columns if column.name == "arrival_ns")
        if pa.types.is_timestamp(schema.field(moment).type):
            clock.unit, clock.relative = "ns", False
        elif _is_trace(schema):
            clock.relative = Metadata.decode(schema.metadata).epoch == "relative"
        before = 0
        try:
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                texts = {name: _text(batch.column(name)) for name in wanted}
                numbers = range(before + 1, before + batch.num_rows + 1)
                yield mapping.records(intake, "parquet", columns, clock, tables.Rows(texts, numbers.__getitem__))
                before += batch.num_rows
        except OSError as error:
            raise BadFile(f"{source.name}: cannot be read from row {before + 1} on") from error


def _is_trace(schema: pa.Schema) -> bool:
    return b"convoy.version" in (schema.metadata or {})


def _text(column: pa.Array) -> pa.Array:
    type_ = column.type
    if pa.types.is_timestamp(type_):
        column = column.cast(pa.timestamp("ns", type_.tz)).cast(pa.int64())
    elif pa.types.is_dictionary(type_):
        column = column.cast(type_.value_type)
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.array([None if row is None else json.dumps(row) for row in column.to_pylist()], pa.string())
    return pc.cast(column, pa.string())
