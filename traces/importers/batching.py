"""Rows gathered one at a time into batches of records, and a check that their ids differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.importers.intake import Intake, record_batch
from traces.record import Metadata

BATCH_ROWS = 8192
REPEATED = "the same id as an earlier row"


class Gather:
    """Collects rows of a fixed set of columns; a batch is due when `full`.

    Args:
        names: record columns, separated by spaces, in the order `add` gives their values.
        metadata: of the file.
    """

    def __init__(self, names: str, metadata: Metadata) -> None:
        self.names, self.metadata = tuple(names.split()), metadata
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


class Seen:
    """Remembers ids by 64-bit hashes, 8 bytes an id.

    New ones wait in a set; the set is merged into sorted arrays that double in size, so a look-up touches about
    log2(ids) of them. Two of 5 million different ids share a hash with a probability below 10^-6.
    """

    _FRESH = 65_536

    def __init__(self) -> None:
        self._fresh: set[int] = set()
        self._sorted: list[npt.NDArray[np.int64]] = []

    def again(self, value: str) -> bool:
        """Whether the id came before; remembered from now on."""
        key = hash(value)
        if key in self._fresh or any(_holds(array, key) for array in self._sorted):
            return True
        self._fresh.add(key)
        if len(self._fresh) >= self._FRESH:
            self._merge(np.sort(np.fromiter(self._fresh, np.int64, len(self._fresh))))
            self._fresh = set()
        return False

    def repeated(self, values: Sequence[str | None]) -> list[int]:
        """Where in a batch of ids (nulls are none) one stands that came before, in the batch or earlier."""
        at = np.array([index for index, value in enumerate(values) if value is not None], np.int64)
        keys = np.fromiter((hash(value) for value in values if value is not None), np.int64, len(at))
        order = np.argsort(keys, kind="stable")
        keys, at = keys[order], at[order]
        known = np.zeros(len(keys), bool)
        known[1:] = keys[1:] == keys[:-1]
        known |= np.isin(keys, np.fromiter(self._fresh, np.int64, len(self._fresh)))
        for array in self._sorted:
            known |= array[np.minimum(np.searchsorted(array, keys), len(array) - 1)] == keys
        if not known.all():
            self._merge(keys[~known])
        return sorted(at[known].tolist())

    def _merge(self, array: npt.NDArray[np.int64]) -> None:
        while self._sorted and len(self._sorted[-1]) <= len(array):
            array = np.sort(np.concatenate([self._sorted.pop(), array]))
        self._sorted.append(array)


def _holds(array: npt.NDArray[np.int64], key: int) -> bool:
    at = int(np.searchsorted(array, key))
    return at < len(array) and int(array[at]) == key


class Ids:
    """Refuses an id that comes twice.

    Args:
        intake: where a repeated id goes as a bad row.
        column: the source's name for the id.
    """

    def __init__(self, intake: Intake, column: str) -> None:
        self._intake, self._column = intake, column
        self._seen = Seen()

    def new(self, row: int, value: str | None) -> bool:
        """Whether the id was not there before (null always is new); a repeated one is a bad row."""
        if value is None or not self._seen.again(value):
            return True
        self._intake.bad_row(row, self._column, REPEATED)
        return False
