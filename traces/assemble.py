"""The trace of a draft: columns copied, ids made unique, prefix blocks made private; and two traces made one.

A copy of a request gets its id with `~` and the copy's number, so does its session, and its prefix blocks become other
hashes: the same for all blocks of one copy, so what was shared inside stays shared, and nothing is shared with the
original.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traces.draft import Draft, Int16s, Report, ShapeError, draft_of
from traces.record import COLUMNS, Metadata, metadata_of
from traces.seeded import mix


def build(trace: pa.Table, draft: Draft, mark: str | None = None) -> pa.Table:
    """The rows of a draft as a trace.

    Args:
        trace: the source whose rows the draft points to.
        draft: what to make of it.
        mark: stands between an id and the number of its copy; None finds one that no id of the source has.

    Returns:
        A table with the source's columns, those of an outcome left out: they tell of another run.
    """
    trace = trace.select(kept_columns(trace.schema.names))
    return finished(trace if is_all(draft, trace.num_rows) else trace.take(pa.array(draft.row)), draft, mark)


def kept_columns(names: list[str]) -> list[str]:
    """The columns that a reshaped trace keeps: those of an outcome tell of another run."""
    outcome = {column.name for column in COLUMNS if column.outcome}
    return [name for name in names if name not in outcome]


def is_all(draft: Draft, rows: int) -> bool:
    """Whether the draft has every row of the source once, in order."""
    return len(draft) == rows and bool((draft.row == np.arange(rows)).all())


def finished(trace: pa.Table, draft: Draft, mark: str | None = None) -> pa.Table:
    """Rows that were taken from the source already, with the times, ids and prefix blocks of their draft."""
    trace = _put(trace, "arrival_ns", pa.array(draft.arrival_ns))
    if draft.think_ns is not None:
        trace = _put(trace, "think_ns", pa.array(draft.think_ns, mask=draft.think_ns < 0))
    if not draft.copy.any():
        return trace
    mark = mark or free_mark(trace)
    for name in ("request_id", "session_id"):
        if name in trace.schema.names:
            trace = _put(trace, name, _renamed(trace.column(name), draft.copy, mark))
    if "block_hashes" in trace.schema.names:
        generation = len(mark) + (len(metadata_of(trace).history) << 16)
        trace = _put(trace, "block_hashes", _resalted(trace.column("block_hashes"), draft.copy, generation))
    return trace


def free_mark(trace: pa.Table) -> str:
    """As many `~` as no id of the trace holds in a row, so copies of copies get ids and prefix blocks of their own."""
    return longer_mark("~", trace)


def longer_mark(mark: str, rows: pa.Table | pa.RecordBatch) -> str:
    """The mark, lengthened until no id of these rows holds it."""
    names = [name for name in ("request_id", "session_id") if name in rows.schema.names]
    while any(pc.any(pc.match_substring(rows.column(name), mark)).as_py() for name in names):
        mark += "~"
    return mark


def _put(trace: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return trace.set_column(trace.schema.get_field_index(name), trace.schema.field(name), values)


def _renamed(column: pa.ChunkedArray, copy: Int16s, mark: str) -> pa.ChunkedArray:
    endings = pa.array([mark + str(number) if number else "" for number in range(int(copy.max()) + 1)])
    return pc.binary_join_element_wise(column, endings.take(pa.array(copy.astype(np.int32))), "")


def _resalted(column: pa.ChunkedArray, copy: Int16s, generation: int) -> pa.Array:
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], type=column.type)
    length = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    of_value = np.repeat(copy, length)
    values = lists.flatten().to_numpy(zero_copy_only=False).copy()
    private = of_value > 0
    salts = mix(np.arange(int(copy.max()) + 1, dtype=np.uint64) + np.uint64(generation << 32))
    values[private] = mix(values[private].view(np.uint64) ^ salts[of_value[private]]).view(np.int64)
    offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pc.is_null(lists))


def merge(trace: pa.Table, other: pa.Table, metadata: Metadata, other_metadata: Metadata) -> tuple[pa.Table, Report]:
    """Both traces as one.

    Two recordings of the same days keep their clock time; anything else starts together. Rows of `other` whose ids are
    taken become private copies.

    Raises:
        ShapeError: the prefix blocks of the two are counted in different units.
    """
    if metadata.block_unit != other_metadata.block_unit and {"block_hashes"} <= {*trace.schema.names} & {
        *other.schema.names
    }:
        raise ShapeError(
            f"--merge: prefix blocks are counted in {metadata.block_unit} here and in {other_metadata.block_unit} there"
        )
    if not other.num_rows or not trace.num_rows:
        raise ShapeError("--merge: one of the two traces is empty")
    start, end = _ends(trace)
    other_start, other_end = _ends(other)
    clock = metadata.epoch == other_metadata.epoch == "unix" and other_start <= end and start <= other_end
    if not clock:
        shifted = pc.add(other.column("arrival_ns"), start - other_start)
        other = other.set_column(other.schema.get_field_index("arrival_ns"), "arrival_ns", shifted)
    if _share_ids(trace, other):
        other = build(other, dataclasses.replace(draft_of(other), copy=np.ones(other.num_rows, dtype=np.int16)))
    schema = pa.schema(
        [pa.field(c.name, c.type) for c in COLUMNS if c.name in {*trace.schema.names, *other.schema.names}],
        metadata=trace.schema.metadata,
    )
    both = pa.concat_tables([_widened(trace, schema), _widened(other, schema)])
    both = both.take(pa.array(np.argsort(both.column("arrival_ns").to_numpy(), kind="stable")))
    report = Report(
        step="merge",
        asked="",
        what="requests",
        before=trace.num_rows,
        planned=trace.num_rows + other.num_rows,
        achieved=both.num_rows,
        note="by clock time" if clock else "both start together",
    )
    return both, report


def _ends(trace: pa.Table) -> tuple[int, int]:
    arrival = trace.column("arrival_ns")
    return arrival[0].as_py(), arrival[-1].as_py()


def _share_ids(trace: pa.Table, other: pa.Table) -> bool:
    for name in ("request_id", "session_id"):
        if name in trace.schema.names and name in other.schema.names:
            known = trace.column(name).drop_null()
            if pc.any(pc.is_in(other.column(name).drop_null(), value_set=known)).as_py():
                return True
    return False


def _widened(trace: pa.Table, schema: pa.Schema) -> pa.Table:
    names = trace.schema.names
    return pa.Table.from_arrays(
        [
            trace.column(field.name).cast(field.type) if field.name in names else pa.nulls(trace.num_rows, field.type)
            for field in schema
        ],
        schema=schema,
    )
