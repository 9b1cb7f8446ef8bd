"""Qwen-Bailian traces: JSON lines of one chat request each, with its place in a conversation.

`chat_id`, `parent_chat_id` (-1 = first of its conversation), `timestamp` (seconds from the start), `input_length`,
`output_length`, `type` (text, search, image, file), `turn`, `hash_ids` (16 tokens a block). A conversation is a chain
of parents; its root's id names the session. A parent that is not in the file (a slice) names it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, signed, timed
from traces.importers.source import Source
from traces.units import NS_PER_S

BLOCK_TOKENS = 16


class Row(msgspec.Struct):
    """A line of the file."""

    chat_id: int
    parent_chat_id: int
    timestamp: Decimal
    input_length: Count
    output_length: Count
    turn: Count
    hash_ids: list[int] | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `session_id`, `turn`, `arrival_ns` (relative), lengths and prefix blocks."""
    ids = Ids(intake, "chat_id")
    roots: dict[int, int] = {}  # chat → root, of the chats that have a parent
    gather = Gather(
        "request_id session_id turn arrival_ns input_tokens output_tokens block_size block_hashes",
        intake.metadata("bailian", "relative"),
    )
    for number, row in jsonrows.read(source, intake, Row):
        try:
            hashes = signed(row.hash_ids)
        except ValueError as error:
            intake.bad_row(number, "hash_ids", str(error))
            continue
        (arrival,) = timed(intake, number, NS_PER_S, timestamp=row.timestamp)
        if arrival is None or not _blocks_fit(intake, number, row) or not ids.new(number, str(row.chat_id)):
            continue
        root = row.chat_id
        if row.parent_chat_id >= 0:
            root = roots.get(row.parent_chat_id, row.parent_chat_id)
            roots[row.chat_id] = root
        gather.add(
            str(row.chat_id),
            str(root),
            max(0, row.turn - 1),
            arrival,
            row.input_length,
            row.output_length,
            None if hashes is None else BLOCK_TOKENS,
            hashes,
        )
        if gather.full:
            yield gather.take()
    yield from gather.rest()


def _blocks_fit(intake: Intake, number: int, row: Row) -> bool:
    full = row.input_length // BLOCK_TOKENS
    if row.hash_ids is None or full <= len(row.hash_ids) <= full + 1:
        return True
    problem = f"{len(row.hash_ids)} blocks for {row.input_length} tokens, where {BLOCK_TOKENS} a block make {full}"
    intake.bad_row(number, "hash_ids", problem)
    return False
