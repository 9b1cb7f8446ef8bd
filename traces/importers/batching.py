"""Rows gathered one at a time into batches of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from traces.importers.intake import record_batch
from traces.record import Metadata

BATCH_ROWS = 8192


class Gather:
    """Collects rows of a fixed set of columns; a batch is due when `full`.

    Args:
        names: record columns, in the order `add` gives their values.
        metadata: of the file.
    """

    def __init__(self, names: Sequence[str], metadata: Metadata) -> None:
        self.names, self.metadata = tuple(names), metadata
        self._rows: list[tuple[object, ...]] = []

    def add(self, *values: object) -> None:
        """One row."""
        self._rows.append(values)

    @property
    def full(self) -> bool:
        """Whether enough rows for a batch are there."""
        return len(self._rows) >= BATCH_ROWS

    def take(self) -> pa.RecordBatch:
        """What was gathered, as a batch."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(self.names)
        self._rows = []
        return record_batch(dict(zip(self.names, map(list, columns), strict=True)), self.metadata)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The last batch, if there are rows left."""
        if self._rows:
            yield self.take()
