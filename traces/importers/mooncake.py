"""Mooncake traces (FAST'25): JSON lines of `timestamp`, `input_length`, `output_length`, `hash_ids`.

`timestamp` is in ms from the start. `hash_ids` are prefix blocks of 512 tokens, numbered anew by the publishers:
equal ids are a reusable prefix. A row has ceil(input_length / 512) of them. Conversation timestamps are quantised to
about 3 s; they are kept as published. Later variants add `session_id`, and `delay` (ms) from the former turn's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, signed, timed
from traces.importers.source import Source
from traces.units import NS_PER_MS

BLOCK_TOKENS = 512


class Row(msgspec.Struct):
    """A line of the file."""

    timestamp: Decimal
    input_length: Count
    output_length: Count
    hash_ids: list[int] | None = None
    session_id: str | int | None = None
    delay: Decimal | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `arrival_ns` (relative), lengths, `block_size`, `block_hashes` and, where given, sessions."""
    block = intake.options.block_size or BLOCK_TOKENS
    gather = Gather(
        "session_id think_ns arrival_ns input_tokens output_tokens block_size block_hashes",
        intake.metadata("mooncake", "relative"),
    )
    for number, row in jsonrows.read(source, intake, Row):
        blocks = -(-row.input_length // block)
        if row.hash_ids is not None and len(row.hash_ids) != blocks:
            problem = (
                f"{len(row.hash_ids)} blocks for {row.input_length} tokens, where {block} tokens a block make {blocks}"
            )
            intake.bad_row(number, "hash_ids", f"{problem} (another size: --block-size 64)")
            continue
        try:
            hashes = signed(row.hash_ids)
        except ValueError as error:
            intake.bad_row(number, "hash_ids", str(error))
            continue
        arrival, delay = timed(intake, number, NS_PER_MS, timestamp=row.timestamp, delay=row.delay)
        if arrival is None:
            continue
        gather.add(
            None if row.session_id is None else str(row.session_id),
            delay,
            arrival,
            row.input_length,
            row.output_length,
            None if hashes is None else block,
            hashes,
        )
        if gather.full:
            yield gather.take()
    yield from gather.rest()
