"""Reshape a file of any length: one pass for the draft, one for the rows.

The first pass reads the columns that decide (times, sessions, tenants) and lets the batches go; the second writes the
result a chunk at a time from the row groups it needs (`traces.rows`). What is in memory is the draft, 14 bytes a row
and more while it is sorted, and one chunk.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow.compute as pc

from traces import parquet
from traces.assemble import finished, kept_columns, longer_mark
from traces.columns import Growing, coded
from traces.draft import Draft, Report, ShapeError
from traces.record import Metadata, schema_for
from traces.resize import CHUNKS, Tally, length_reports, scale_lengths
from traces.rows import Rows, chunks, columns_of
from traces.seeded import mix, text_keys

if TYPE_CHECKING:
    from traces.reshape import LengthFactors, ShapeOptions

_LENGTHS = ("input_tokens", "output_tokens", "arrival_ns")


def reshape_file(
    path: str | os.PathLike[str], out: str | os.PathLike[str], options: ShapeOptions, *, seed: int
) -> tuple[int, list[Report]]:
    """See `traces.reshape.apply_to_file`; the options hold no merge."""
    from traces.reshape import in_order, redraft, with_history

    names, metadata = columns_of(path)
    draft, tenants = read_draft(path, drawing=options.sample is not None or options.rate is not None)
    draft, reports = redraft(draft, options, tenants, seed=seed)
    mark = read_mark(path) if draft.copy.any() else "~"
    kept = kept_columns(names)
    if options.lengths is not None:
        reports += _length_reports(path, draft, options.lengths, metadata)
    reports = in_order(reports)
    written = [name for name in kept if options.lengths is None or name not in CHUNKS]
    schema = schema_for(written, with_history(metadata, reports, seed))
    with contextlib.closing(Rows(path, kept, metadata)) as rows, parquet.Writer(out, schema) as writer:
        for part in chunks(len(draft)):
            some = draft.take(part)
            table = finished(rows.take(some.row), some, mark)
            if options.lengths is not None:
                table, _ = scale_lengths(table, *msgspec.structs.astuple(options.lengths))
            writer.write(table)
    return len(draft), reports


def _length_reports(
    path: str | os.PathLike[str], draft: Draft, lengths: LengthFactors, metadata: Metadata
) -> list[Report]:
    factors = msgspec.structs.astuple(lengths)
    tally = Tally()
    with contextlib.closing(Rows(path, list(_LENGTHS), metadata)) as rows:
        for part in chunks(len(draft)):
            tally = tally.plus(scale_lengths(rows.take(draft.row[part]), *factors)[1])
    return length_reports(tally, *factors)


def read_draft(path: str | os.PathLike[str], *, drawing: bool) -> tuple[Draft, list[str]]:
    """The draft of a file as it is, by arrival, and its tenants by code.

    Args:
        path: a trace.
        drawing: whether a step will draw, so session keys are needed.

    Raises:
        TraceError: the file breaks a rule of the record, or is empty.
    """
    wanted = ["arrival_ns", "think_ns", "tenant", "session_id", *(["request_id"] if drawing else [])]
    grown: dict[str, Growing] = {}
    tenants: dict[str, int] = {}
    alone = True

    def add(name: str, values: np.ndarray) -> None:
        grown.setdefault(name, Growing(values.dtype)).append(values)

    for batch in parquet.batches(path, wanted):
        names = batch.schema.names
        add("arrival", batch.column("arrival_ns").to_numpy())
        if "think_ns" in names:
            add("think", pc.fill_null(batch.column("think_ns"), -1).to_numpy(zero_copy_only=False))
        if "tenant" in names:
            add("tenant", coded(batch.column("tenant"), tenants))
        alone = alone and ("session_id" not in names or batch.column("session_id").null_count == batch.num_rows)
        if drawing:
            keys = np.zeros(batch.num_rows, dtype=np.uint64)
            for name in ("request_id", "session_id"):
                keys = text_keys(batch.column(name), keys) if name in names else keys
            add("keys", keys)
    if not grown:
        raise ShapeError("the trace is empty: there is nothing to reshape")
    return _sorted_draft({name: column.values() for name, column in grown.items()}, alone=alone), list(tenants)


def _sorted_draft(columns: dict[str, np.ndarray], *, alone: bool) -> Draft:
    arrival = columns["arrival"]
    think = columns.get("think")
    draft = Draft(
        row=np.arange(len(arrival), dtype=np.int32),
        copy=np.zeros(len(arrival), dtype=np.int16),
        arrival_ns=arrival,
        think_ns=think if think is not None and think.max() >= 0 else None,
        session=columns.get("keys"),
        tenant=columns.get("tenant"),
        alone=alone,
    )
    if (arrival[1:] < arrival[:-1]).any():
        draft = draft.take(np.argsort(arrival, kind="stable"))
    if draft.session is not None:
        nameless = np.flatnonzero(draft.session == 0)
        draft.session[nameless] = mix(nameless.astype(np.uint64))
    return draft


def read_mark(path: str | os.PathLike[str]) -> str:
    """The mark of copies that no id of the file holds."""
    mark = "~"
    for batch in parquet.batches(path, ["request_id", "session_id"]):
        mark = longer_mark(mark, batch)
    return mark
