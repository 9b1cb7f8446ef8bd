"""Measured rows on their way to disk: each worker appends Arrow record batches to a file of its own.

A batch is some hundred rows, or what a second has brought, so a worker that dies loses no more than its last second. It
is made a column at a time (`step`), for the loop stands still meanwhile: a whole batch of 256 rows takes 1.2 ms, and
whoever is due then would be late. A part holds what only the sender knows, with the row's place in the plan; what the
plan knows (ids, tenant, lengths asked for) is joined when the run is over. No column holds text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from replay.plan import NONE, Plan
from traces.meter import Measured
from traces.record import ENDPOINTS, SCHEMA, Metadata, schema_for

MEASURED = (
    "status",
    "outcome",
    "finish_reason",
    "error",
    "headers_ns",
    "first_token_ns",
    "first_visible_ns",
    "last_token_ns",
    "end_ns",
    "chunk_ns",
    "chunk_tokens",
    "queue_ns",
    "prefill_ns",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "tokens_source",
    "response_bytes",
)
SENT = ("due_ns", "released_ns", "sent_ns", "connect_ns", "attempts", "request_bytes")

BATCH_ROWS, BATCH_CHUNKS = 256, 4_096  # rows, and times of chunks in them, that are worth a batch
_TOGETHER = 4096  # rows that are joined with the plan at a time


def _plain(field: pa.Field) -> pa.DataType:
    return field.type.value_type if pa.types.is_dictionary(field.type) else field.type


PART_SCHEMA = pa.schema(
    [pa.field("row", pa.int32()), *(pa.field(name, _plain(SCHEMA.field(name))) for name in (*SENT, *MEASURED))]
)
_NAMES = (*SENT, *MEASURED)
Names = tuple[tuple[str, ...], str | None]  # models asked for, arm
_measured = attrgetter(*MEASURED)
_TYPES = tuple(field.type for field in PART_SCHEMA)


class RowWriter:
    """Appends rows to a part, a batch at a time and a batch by small steps: `step` while `full` or `making`.

    Args:
        path: the part's file.
    """

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._rows: list[tuple[Any, ...]] = []
        self._chunks = 0
        self._made: list[pa.Array] = []
        self._columns: list[tuple[Any, ...]] = []  # of the batch in the making
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, PART_SCHEMA)
        for type_ in _TYPES:  # what Arrow imports and builds with its first array is done now
            pa.array([None], type=type_)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether a batch has gathered."""
        return len(self._rows) >= BATCH_ROWS or self._chunks >= BATCH_CHUNKS

    @property
    def making(self) -> bool:
        """Whether a batch has been begun."""
        return bool(self._columns)

    def append(self, row: int, sent: tuple[Any, ...], measured: Measured) -> None:
        """One request that has ended: its place in the plan, the SENT values, what was measured."""
        self._rows.append((row, *sent, *_measured(measured)))
        if measured.chunk_ns is not None:
            self._chunks += len(measured.chunk_ns)

    def step(self) -> None:
        """Begin a batch of all rows gathered; or make one more of its columns; or, with all made, write it."""
        if not self._columns:
            self._columns, self._rows, self._chunks = list(zip(*self._rows, strict=True)), [], 0
        elif len(self._made) < len(self._columns):
            place = len(self._made)
            self._made.append(pa.array(self._columns[place], type=_TYPES[place]))
        else:
            batch = pa.RecordBatch.from_arrays(self._made, schema=PART_SCHEMA)
            self._stream.write_batch(batch)
            self.written += batch.num_rows
            self._made, self._columns = [], []

    def flush(self) -> None:
        """Write all rows there are."""
        while self.making or self._rows:
            self.step()

    def close(self) -> None:
        """Flush and end the file."""
        self.flush()
        self._stream.close()
        self._sink.close()


def read_part(path: Path) -> Iterator[pa.RecordBatch]:
    """A part in larger batches, up to the last complete one (the writer may have died in the middle of the next)."""
    if not path.exists() or not path.stat().st_size:
        return
    small: list[pa.RecordBatch] = []
    rows = 0
    with contextlib.suppress(StopIteration, pa.ArrowInvalid, OSError):
        reader = pa.ipc.open_stream(pa.OSFile(str(path), "rb"))
        while True:
            small.append(reader.read_next_batch())
            rows += small[-1].num_rows
            if rows >= _TOGETHER:
                yield _one(small)
                small, rows = [], 0
    if small:
        yield _one(small)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def outcome_schema(plan: Plan, metadata: Metadata, *, arm: str | None = None) -> pa.Schema:
    """The schema of an outcome file: what the plan knows and what was measured."""
    names = ["request_id", "turn", "tenant", "priority", "arrival_ns", "model", "endpoint", "stream", "n", "max_tokens"]
    names += ["planned_input_tokens", "planned_output_tokens", "worker", "warmup", "think_ns", *SENT, *MEASURED]
    if plan.session_id is not None:
        names.append("session_id")
    if len(plan.block_hashes) > 1:
        names += ["block_size", "block_hashes"]
    if arm is not None:
        names.append("arm")
    return schema_for(names, metadata)


def outcomes(
    plan: Plan, parts: list[Path], schema: pa.Schema, *, models: tuple[str, ...], arm: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Every row of the plan as an outcome: what was measured, in the order it ended, then what was never sent.

    Args:
        plan: what was to be sent.
        parts: the workers' files, in the order of the workers.
        schema: from `outcome_schema`.
        models: model name asked for per row kind: `plan.models` as the server knows them, then the default.
        arm: name of the experiment's arm.
    """
    seen = np.zeros(plan.rows, dtype=np.bool_)
    for worker, part in enumerate(parts):
        for batch in read_part(part):
            rows = batch.column("row").to_numpy()
            fresh = ~seen[rows]
            seen[rows] = True
            measured = {name: batch.column(name) for name in _NAMES}
            measured["worker"] = pa.array(np.full(len(rows), worker, np.int32))
            if not fresh.all():
                keep = pa.array(fresh)
                rows = rows[fresh]
                measured = {name: column.filter(keep) for name, column in measured.items()}
            yield joined(plan, rows, measured, schema, (models, arm))
    unsent = np.flatnonzero(~seen)
    for start in range(0, len(unsent), 65_536):
        rows = unsent[start : start + 65_536]
        measured = {"outcome": pa.array(["unsent"] * len(rows)), "due_ns": _due_of_unsent(plan, rows)}
        yield joined(plan, rows, measured, schema, (models, arm))


def _due_of_unsent(plan: Plan, rows: npt.NDArray[np.integer]) -> pa.Array:
    """A first turn's due time is known; a later turn that was never reached had none yet."""
    return pa.array(plan.at_ns[rows], mask=plan.previous[rows] != NONE)


def joined(
    plan: Plan, rows: npt.NDArray[np.integer], measured: dict[str, pa.Array], schema: pa.Schema, names: Names
) -> pa.RecordBatch:
    """Plan columns of `rows` beside the measured ones, by name; what nobody knows is null."""
    models, arm = names
    place = pa.array(rows)
    known: dict[str, Any] = {
        "request_id": _ids(plan, rows),
        "turn": _nullable(plan.turn[rows]),
        "tenant": _dictionary(plan.tenant[rows], plan.tenants),
        "priority": _nullable(plan.rank[rows]),
        "model": _dictionary(np.where(plan.model[rows] == NONE, len(models) - 1, plan.model[rows]), models),
        "endpoint": _dictionary(plan.endpoint[rows], ENDPOINTS),
        "stream": pa.array(plan.stream[rows]),
        "n": pa.array(plan.n[rows]),
        "max_tokens": pa.array(plan.output_tokens[rows]),
        "think_ns": _nullable(plan.think_ns[rows]),
        "planned_input_tokens": pa.array(plan.input_tokens[rows]),
        "planned_output_tokens": pa.array(plan.output_tokens[rows]),
        "warmup": pa.array(plan.at_ns[rows] < plan.warmup_ns),
        "arrival_ns": measured.get("sent_ns", pa.array(plan.at_ns[rows])),
    }
    if plan.session_id is not None:
        known["session_id"] = plan.session_id.take(place)
    if arm is not None:
        known["arm"] = _dictionary(np.zeros(len(rows), np.int32), (arm,))
    if "block_hashes" in schema.names:
        known["block_size"] = _nullable(plan.block_size[rows])
        known["block_hashes"] = _hashes(plan, rows)
    known.update(measured)
    arrays = []
    for field in schema:
        column = known.get(field.name)
        if column is None:
            arrays.append(pa.nulls(len(rows), field.type))
        elif column.type == field.type:
            arrays.append(column)
        elif pa.types.is_dictionary(field.type):
            arrays.append(column.dictionary_encode())
        else:
            arrays.append(pc.cast(column, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _ids(plan: Plan, rows: npt.NDArray[np.integer]) -> pa.Array:
    if plan.request_id is not None:
        return plan.request_id.take(pa.array(rows))
    return pc.binary_join_element_wise("r", pc.cast(pa.array(rows), pa.string()), "")


def _nullable(values: npt.NDArray[np.signedinteger[Any]]) -> pa.Array:
    return pa.array(values, mask=values == NONE)


def _dictionary(index: npt.NDArray[np.integer], words: tuple[str, ...]) -> pa.Array:
    if not words:
        return pa.nulls(len(index), pa.dictionary(pa.int32(), pa.string()))
    return pa.DictionaryArray.from_arrays(pa.array(index.astype(np.int32)), pa.array(words, pa.string()))


def _hashes(plan: Plan, rows: npt.NDArray[np.integer]) -> pa.Array:
    lists = [plan.block_hashes[plan.block_offsets[row] : plan.block_offsets[row + 1]] for row in rows.tolist()]
    return pa.array(lists, pa.list_(pa.int64()))
