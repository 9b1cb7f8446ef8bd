"""Azure LLM inference traces, 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`, one row per invocation.

2023 writes `2023-11-16 18:17:03.9799600` (100 ns ticks, no offset: read as UTC), 2024 writes
`2024-05-10 00:00:00.009930+00:00`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from traces.importers import tables
from traces.importers.clock import Clock
from traces.importers.intake import Intake, record_batch
from traces.importers.source import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `arrival_ns` (UTC epoch), `input_tokens`, `output_tokens`."""
    clock = Clock("iso", relative=False)
    metadata = intake.metadata("azure", "unix")
    for rows in tables.read(source, intake, COLUMNS):
        arrival = clock.ns(rows.columns["TIMESTAMP"])
        context = tables.counts(rows.columns["ContextTokens"])
        generated = tables.counts(rows.columns["GeneratedTokens"])
        batch = record_batch(
            {"arrival_ns": arrival.values, "input_tokens": context.values, "output_tokens": generated.values}, metadata
        )
        yield tables.kept(batch, intake, rows, dict(zip(COLUMNS, (arrival, context, generated), strict=True)))
