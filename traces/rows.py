"""Rows of a trace by position, without the trace in memory: what a reshaping of a large file is written from.

A reshaped trace takes rows mostly in the order of the file, so a chunk of the result needs one or two row groups; those
are read, the rows taken, and let go. Positions count through all files of the trace in name order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traces import parquet
from traces.record import Metadata, metadata_of, schema_for

CHUNK_ROWS = 1 << 18


class Rows:
    """Random access to the rows of a trace file, a folder of parts or a glob.

    Args:
        path: as `traces.parquet` takes it; its rows were checked when the draft was made.
        columns: those to read, in record order.
        metadata: of the whole trace.
    """

    def __init__(self, path: str | os.PathLike[str], columns: list[str], metadata: Metadata) -> None:
        filesystem, names = parquet.locate(path)
        self.schema = schema_for(columns, metadata)
        self._files = [pq.ParquetFile(filesystem.open_input_file(name)) for name in names]
        self._groups = [(file, group) for file in self._files for group in range(file.num_row_groups)]
        sizes = [file.metadata.row_group(group).num_rows for file, group in self._groups]
        self._starts = np.cumsum([0, *sizes])

    def take(self, positions: npt.NDArray[Any]) -> pa.Table:
        """The rows at these positions, in this order."""
        ordered, back = np.unique(positions, return_inverse=True)
        bounds = np.searchsorted(ordered, self._starts)
        pieces = [
            self._group(number).take(pa.array(ordered[low:high] - self._starts[number]))
            for number, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
            if low < high
        ]
        joined = pa.concat_tables(pieces).unify_dictionaries()
        return joined if len(back) == len(ordered) and _counts_up(back) else joined.take(pa.array(back))

    def _group(self, number: int) -> pa.Table:
        file, group = self._groups[number]
        there = [name for name in self.schema.names if name in file.schema_arrow.names]
        table = file.read_row_group(group, columns=there)
        return pa.Table.from_arrays(
            [
                table.column(field.name).cast(field.type)
                if field.name in there
                else pa.nulls(table.num_rows, field.type)
                for field in self.schema
            ],
            schema=self.schema,
        )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close(force=True)


def _counts_up(values: npt.NDArray[Any]) -> bool:
    return bool((values == np.arange(len(values))).all())


def columns_of(path: str | os.PathLike[str]) -> tuple[list[str], Metadata]:
    """Names of the columns that a trace has, and its metadata. Raises BadFile."""
    first = next(parquet.batches(path, batch_rows=1), None)
    if first is None:
        table = parquet.read(path)
        return table.schema.names, metadata_of(table)
    return first.schema.names, metadata_of(first)


def chunks(rows: int) -> Iterator[slice]:
    """Slices that cover so many rows."""
    for start in range(0, rows, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, rows))
