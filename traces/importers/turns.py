"""Turns and think times of sources that name a session and no more.

Rows of a session are its turns in the order they arrive. The think time of a turn is its arrival minus the end of the
former one; null where that end is not known or came later. What a source tells itself stands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.importers.intake import record_batch
from traces.record import Metadata

_NEVER = np.iinfo(np.int64).min

Ints = npt.NDArray[np.int64]


def wanted(rows: pa.Table | pa.RecordBatch) -> bool:
    """Whether some of the rows have a session and none is told its turn."""
    names = rows.schema.names
    return "session_id" in names and "turn" not in names and rows.column("session_id").null_count < rows.num_rows


class Turns:
    """Numbers the rows of a stream of batches in order of arrival; remembers a session by the hash of its id."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._end_ns: dict[int, int] = {}

    def number(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `turn` and `think_ns`. For rows that have sessions and no turns."""
        names = batch.schema.names
        encoded = batch.column("session_id").cast(pa.string()).dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        keys = [hash(word) for word in encoded.dictionary.to_pylist()]
        arrival = batch.column("arrival_ns").to_numpy()
        turn, think = self._follow(codes, keys, arrival, _ends(batch, arrival))
        columns: dict[str, object] = {name: batch.column(name) for name in names}
        numbered = pa.array(turn, mask=codes < 0)
        thought = pa.array(think, mask=think < 0)
        columns["turn"] = numbered
        columns["think_ns"] = pc.coalesce(batch.column("think_ns"), thought) if "think_ns" in names else thought
        return record_batch(columns, Metadata.decode(batch.schema.metadata))

    def _follow(self, codes: Ints, keys: list[int], arrival: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """(turn, think time or -1) of each row; ends are `_NEVER` where unknown."""
        order = np.argsort(codes, kind="stable")
        grouped = codes[order]
        begins = np.flatnonzero(np.diff(grouped, prepend=-2))
        sizes = np.diff(np.append(begins, len(order)))
        place = np.arange(len(order)) - np.repeat(begins, sizes)
        before = np.full(len(order), _NEVER)
        before[1:] = ends[order][:-1]
        turn = place.copy()
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            code = int(grouped[begin])
            if code < 0:
                continue
            key = keys[code]
            former = self._count.get(key, 0)
            before[begin] = self._end_ns.get(key, _NEVER)
            if former:
                turn[begin : begin + size] += former
            self._count[key] = former + size
            last = int(ends[order[begin + size - 1]])
            if last != _NEVER:
                self._end_ns[key] = last
            else:
                self._end_ns.pop(key, None)
        found, think = np.empty_like(turn), np.empty_like(turn)
        found[order] = turn
        think[order] = np.where((before == _NEVER) | (turn == 0), -1, arrival[order] - before)
        return found, np.where(codes < 0, -1, think)


def _ends(batch: pa.RecordBatch, arrival: Ints) -> Ints:
    if "end_ns" not in batch.schema.names:
        return np.full(batch.num_rows, _NEVER)
    end = batch.column("end_ns")
    known = end.is_valid().to_numpy(zero_copy_only=False)
    return np.where(known, arrival + pc.fill_null(end, 0).to_numpy(zero_copy_only=False), _NEVER)
