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
    """Numbers the rows of a stream of batches in order of arrival.

    A session is known by the hash of its id: sorted keys, turns so far and the last end, 20 bytes a session.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int32)
        self._end_ns = np.zeros(0, np.int64)

    def number(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `turn` and `think_ns`. For rows that have sessions and no turns."""
        names = batch.schema.names
        encoded = batch.column("session_id").cast(pa.string()).dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        keys = np.fromiter(map(hash, encoded.dictionary.to_pylist()), np.int64, len(encoded.dictionary))
        arrival = batch.column("arrival_ns").to_numpy()
        turn, think = self._follow(codes, keys, arrival, _ends(batch, arrival))
        columns: dict[str, object] = {name: batch.column(name) for name in names}
        numbered = pa.array(turn, mask=codes < 0)
        thought = pa.array(think, mask=think < 0)
        columns["turn"] = numbered
        columns["think_ns"] = pc.coalesce(batch.column("think_ns"), thought) if "think_ns" in names else thought
        return record_batch(columns, Metadata.decode(batch.schema.metadata))

    def _follow(self, codes: Ints, keys: Ints, arrival: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """(turn, think time or -1) of each row; ends are `_NEVER` where unknown."""
        order = np.argsort(codes, kind="stable")
        order = order[np.count_nonzero(codes < 0) :]  # rows without a session come first
        grouped = codes[order]
        begins = np.flatnonzero(np.diff(grouped, prepend=-1))
        sizes = np.diff(np.append(begins, len(order)))
        before = np.full(len(order), _NEVER)
        before[1:] = ends[order][:-1]
        former, before[begins] = self._known(keys[grouped[begins]])
        turn = np.arange(len(order)) + np.repeat(former - begins, sizes)
        self._remember(keys[grouped[begins]], former + sizes, ends[order[begins + sizes - 1]])
        turns, think = np.zeros(len(codes), np.int64), np.full(len(codes), -1)
        turns[order] = turn
        think[order] = np.where((before == _NEVER) | (turn == 0), -1, arrival[order] - before)
        return turns, think

    def _known(self, keys: Ints) -> tuple[Ints, Ints]:
        """(turns so far, last end) of sessions: 0 and `_NEVER` of new ones."""
        at = np.minimum(np.searchsorted(self._keys, keys), max(0, len(self._keys) - 1))
        if not len(self._keys):
            return np.zeros(len(keys), np.int64), np.full(len(keys), _NEVER)
        known = self._keys[at] == keys
        return np.where(known, self._count[at], 0), np.where(known, self._end_ns[at], _NEVER)

    def _remember(self, keys: Ints, count: Ints, end_ns: Ints) -> None:
        stay = ~np.isin(self._keys, keys)
        merged = np.concatenate([self._keys[stay], keys])
        order = np.argsort(merged)
        self._keys = merged[order]
        self._count = np.concatenate([self._count[stay], count.astype(np.int32)])[order]
        self._end_ns = np.concatenate([self._end_ns[stay], end_ns])[order]


def _ends(batch: pa.RecordBatch, arrival: Ints) -> Ints:
    if "end_ns" not in batch.schema.names:
        return np.full(batch.num_rows, _NEVER)
    end = batch.column("end_ns")
    known = end.is_valid().to_numpy(zero_copy_only=False)
    return np.where(known, arrival + pc.fill_null(end, 0).to_numpy(zero_copy_only=False), _NEVER)
