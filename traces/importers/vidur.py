"""Vidur's processed traces: `arrived_at,num_prefill_tokens,num_decode_tokens`, or lengths without any arrival.

`arrived_at` is in seconds from the first request. The arxiv summarisation file has no arrival column at all; it imports
as lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from traces.importers import tables
from traces.importers.clock import Clock
from traces.importers.intake import Intake, record_batch
from traces.importers.source import Source

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `arrival_ns` (relative) and lengths; of lengths only where the file has no arrivals."""
    clock = Clock("s", relative=True)
    for rows in tables.read(source, intake, COLUMNS, ("arrived_at",)):
        parsed = {name: tables.counts(rows.columns[name]) for name in COLUMNS}
        timed = "arrived_at" in rows.columns
        arrival = np.zeros(len(rows), np.int64)
        if timed:
            parsed["arrived_at"] = tables.not_negative(clock.ns(rows.columns["arrived_at"]))
            arrival = parsed["arrived_at"].values
        batch = record_batch(
            {
                "arrival_ns": arrival,
                "input_tokens": parsed["num_prefill_tokens"].values,
                "output_tokens": parsed["num_decode_tokens"].values,
            },
            intake.metadata("vidur", "relative", lengths=not timed),
        )
        yield tables.kept(batch, intake, rows, parsed)
