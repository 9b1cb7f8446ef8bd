"""BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.

Newer files also have `Session ID` and `Elapsed time`. `Timestamp` counts seconds from midnight of the first day (1 s
resolution). Rows with 0 response tokens are failed requests. `Elapsed time` is the whole response in seconds, not the
first token.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from traces.importers import tables
from traces.importers.clock import Clock, Parsed, decimal_ns
from traces.importers.intake import Intake, record_batch
from traces.importers.source import Source

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
_OPTIONAL = ("Session ID", "Elapsed time")


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `arrival_ns` (relative), `model`, lengths, and where the file has them `session_id` and `end_ns`."""
    clock = Clock("s", relative=True)
    metadata = intake.metadata("burstgpt", "relative")
    for rows in tables.read(source, intake, COLUMNS, _OPTIONAL):
        text = rows.columns
        parsed = {
            "Timestamp": tables.not_negative(clock.ns(text["Timestamp"])),
            "Request tokens": tables.counts(text["Request tokens"]),
            "Response tokens": tables.counts(text["Response tokens"]),
        }
        columns: dict[str, object] = {
            "arrival_ns": parsed["Timestamp"].values,
            "model": tables.words(text["Model"]),
            "input_tokens": parsed["Request tokens"].values,
            "output_tokens": parsed["Response tokens"].values,
        }
        if "Session ID" in text:
            columns["session_id"] = tables.words(text["Session ID"])
        if "Elapsed time" in text:
            columns["end_ns"], parsed["Elapsed time"] = _elapsed(text["Elapsed time"])
        yield tables.kept(record_batch(columns, metadata), intake, rows, parsed)


def _elapsed(text: pa.Array) -> tuple[pa.Array, Parsed]:
    """Durations in ns, null where the source has none (empty or 0)."""
    empty = pc.equal(text, "")
    parsed = decimal_ns(pc.if_else(empty, "0", text), "s")
    return pa.array(parsed.values, mask=parsed.values <= 0), tables.not_negative(parsed)
