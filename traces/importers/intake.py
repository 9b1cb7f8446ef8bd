"""What an import was asked to do with rows it cannot take as they are, and the count of everything it did.

An importer hands each unreadable row to `Intake.bad_row`, which raises (`--bad-rows error`) or counts it (`skip`), and
goes on. Nothing is dropped without a count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import BadRow
from traces.record import FAILURES, Metadata, schema_for

NO_OUTPUT_ENDPOINTS = ("embeddings", "rerank")


class Options(NamedTuple):
    """How to import: the policies, and what single formats ask for."""

    bad_rows: str = "error"  # or "skip"
    failed: str = "keep"  # or "drop"
    mapping: tuple[tuple[str, str], ...] = ()  # record column → column of the source, as --map says
    block_size: int | None = None  # tokens in a prefix block, where the format does not say
    subagents: str = "drop"  # or "keep": requests that an agent's own agents made
    seed: int = 0  # for formats that are drawn (ServeGen)
    duration_ns: int | None = None
    start_ns: int | None = None


class Intake:
    """State of one import: policies in, counts out."""

    def __init__(self, source: str, options: Options = Options()) -> None:  # noqa: B008 - frozen
        self.source, self.options = source, options
        self.rows = 0
        self.bad = 0
        self.failed = 0
        self.elsewhere = 0  # requests to no LLM endpoint
        self.out_of_order = 0
        self.notes: list[str] = []
        self._last_ns: int | None = None

    def bad_row(self, row: int, column: str | None, problem: str) -> None:
        """An unreadable data row (from 1). Raises BadRow unless bad rows are to be skipped; then counts it."""
        if self.options.bad_rows == "error":
            raise BadRow(self.source, row, column, problem)
        self.bad += 1

    def note(self, line: str) -> None:
        """Something the user should know, said once."""
        if line and line not in self.notes:
            self.notes.append(line)

    def metadata(self, name: str, epoch: str, block_unit: str = "tokens", *, lengths: bool = False) -> Metadata:
        """Metadata of a file imported from format `name`; `lengths` marks a source without arrivals."""
        if lengths:
            self.note("lengths only: no times in this file (traces synth or --poisson can time them)")
        base = self.source.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return Metadata(
            epoch=epoch,
            block_unit=block_unit,
            source="lengths" if lengths else f"{name} {base}",
            history=(f"import {name} {base}",),
        )

    def settle(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with an outcome on every row that tells one, failures kept or dropped, everything counted."""
        batch = _with_outcome(batch)
        self.count_order(batch.column("arrival_ns").to_numpy(zero_copy_only=False))
        if "outcome" in batch.schema.names:
            words = batch.column("outcome")
            values = words.dictionary if pa.types.is_dictionary(words.type) else words
            if set(pc.unique(values).to_pylist()) & set(FAILURES):
                failed = pc.fill_null(pc.is_in(words.cast(pa.string()), pa.array(FAILURES)), fill_value=False)
                self.failed += pc.sum(failed).as_py() or 0
                if self.options.failed == "drop":
                    batch = batch.filter(pc.invert(failed))
        if "endpoint" in batch.schema.names:
            self.elsewhere += pc.sum(pc.equal(batch.column("endpoint").cast(pa.string()), "other")).as_py() or 0
        self.rows += batch.num_rows
        return batch

    def count_order(self, arrival_ns: npt.NDArray[np.int64]) -> None:
        """Count the steps where time decreases, across batches too."""
        if not len(arrival_ns):
            return
        if self._last_ns is not None and arrival_ns[0] < self._last_ns:
            self.out_of_order += 1
        self.out_of_order += int(np.count_nonzero(arrival_ns[1:] < arrival_ns[:-1]))
        self._last_ns = int(arrival_ns[-1])

    def summary(self) -> list[str]:
        """The counts, one line each."""
        lines = [_counted(self.rows, "row")]
        if self.elsewhere:
            lines.append(f"{self.elsewhere:,} of them to no LLM endpoint")
        if self.failed:
            what = "kept with their outcome" if self.options.failed == "keep" else "dropped"
            lines.append(f"{_counted(self.failed, 'failed row')} (no output tokens, or an error) {what}")
        if self.bad:
            lines.append(f"{_counted(self.bad, 'unreadable row')} skipped")
        if self.out_of_order:
            lines.append(f"{_counted(self.out_of_order, 'row')} out of order, sorted")
        return [*lines, *self.notes]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _with_outcome(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Where the source tells no outcome: `no_token` for 0 output tokens, `ok` for more, null for unknown."""
    names = batch.schema.names
    if "output_tokens" not in names:
        return batch
    tokens = batch.column("output_tokens")
    told = pc.if_else(pc.equal(tokens, 0), "no_token", "ok")
    if "endpoint" in names:
        exempt = pc.is_in(batch.column("endpoint").cast(pa.string()), pa.array(NO_OUTPUT_ENDPOINTS))
        told = pc.if_else(pc.and_(exempt, pc.equal(tokens, 0)), "ok", told)
    if "outcome" in names:
        given = batch.column("outcome").cast(pa.string())
        told = pc.if_else(pc.and_(pc.equal(given, "ok"), pc.equal(told, "no_token")), told, pc.coalesce(given, told))
        told = pc.coalesce(told, given)
    columns = {name: batch.column(name) for name in names}
    return record_batch({**columns, "outcome": told}, Metadata.decode(batch.schema.metadata))


def record_batch(columns: dict[str, object], metadata: Metadata) -> pa.RecordBatch:
    """A batch of records from arrays or lists by column name, in record order and with the record's types."""
    schema = schema_for(tuple(columns), metadata)
    arrays = []
    for field in schema:
        values = columns[field.name]
        if not isinstance(values, pa.Array):
            values = pa.array(values, type=field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
        arrays.append(_as_type(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_type(values: pa.Array, type_: pa.DataType) -> pa.Array:
    if values.type == type_:
        return values
    if pa.types.is_dictionary(type_) and not pa.types.is_dictionary(values.type):
        return values.cast(type_.value_type).dictionary_encode()
    return values.cast(type_)
