"""kv-cache-tester: one JSON object a conversation with a coding agent; a file of one, or a folder of them.

A request has `t` (s from the conversation's start), `type` (`s` streamed, `n` not), `in`, `out`, `hash_ids` (full
blocks of `block_size` tokens: the last partial block has no id), and where known `api_time`, `think_time`, `ttft` (s).
An entry of type `subagent` holds requests of its own, timed from its `t`; with `--subagents keep` each becomes a
session beside its parent's. Ids are meaningful inside a file only: those of the second file of a folder are moved out
of the way of the first's, and so on. The published set holds a conversation twice; a repeated `id` is a bad row.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, NamedTuple

import msgspec
import pyarrow as pa

from traces.errors import BadFile, BadRow
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, exact_ns, explain
from traces.importers.source import Source
from traces.units import NS_PER_S

_COLUMNS = (
    "session_id turn think_ns arrival_ns model endpoint stream input_tokens output_tokens tokens_source block_size "
    "block_hashes first_token_ns end_ns finish_reason"
)


class Entry(msgspec.Struct):
    """A request, or a sub-agent with requests of its own."""

    t: Decimal
    type: str
    model: str | None = None
    input: Count | None = msgspec.field(name="in", default=None)
    out: Count | None = None
    hash_ids: list[Count] | None = None
    api_time: Decimal | None = None
    think_time: Decimal | None = None
    ttft: Decimal | None = None
    stop: str | None = None
    agent_id: str | None = None
    requests: list[Entry] | None = None


class Conversation(msgspec.Struct):
    """A file."""

    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[Entry]


class Place(NamedTuple):
    """Where a row stands: data row of its file, session, turn, and the ns its `t` counts from."""

    row: int
    session: str
    turn: int
    start_ns: int


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of sessions, turns, think times, lengths and blocks; arrivals count from each conversation's start."""
    gather = Gather(_COLUMNS, intake.metadata("kvcache", "relative"))
    ids = Ids(intake, "id")
    offset = files = left_out = 0
    for file in _files(source):
        intake.source = file.name  # so that a message names the file in the folder
        conversation = _decode(file)
        if not ids.new(1, conversation.id):
            continue
        files += 1
        highest = offset
        for place, entry in _entries(conversation, keep_nested=intake.options.subagents == "keep"):
            highest = max(highest, offset + max(entry.hash_ids or [0]))
            values = _row(intake, conversation, place, entry, offset)
            if values is not None:
                gather.add(*values)
            if gather.full:
                yield gather.take()
        left_out += sum(len(entry.requests or []) for entry in conversation.requests)
        offset = highest + 1
    intake.source = source.name
    yield from gather.rest()
    if files > 1:
        intake.note(f"{files} conversations, each counted from its own start")
    if left_out and intake.options.subagents == "drop":
        intake.note(f"{left_out} requests of sub-agents left out (--subagents keep)")


def _files(source: Source) -> Iterator[Source]:
    if not source.path.is_dir():
        yield source
        return
    found = sorted(path for path in source.path.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not found:
        raise BadFile(f"{source.name}: a folder without *.json conversations")
    for path in found:
        yield Source(path)


def _decode(file: Source) -> Conversation:
    with file.open() as stream:
        data = stream.read()
    try:
        return msgspec.json.decode(data, type=Conversation, strict=False)
    except msgspec.ValidationError as error:
        field, problem = explain(error)
        row, column = _position(field)
        if row is None and column in {None, "id", "block_size", "requests"}:
            raise BadFile(
                f"{file.name}: not a kv-cache-tester conversation ({column or 'object'} {problem})"
            ) from error
        raise BadRow(file.name, row, column, problem) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{file.name}: not a complete JSON object ({error})") from error


def _position(field: str | None) -> tuple[int | None, str | None]:
    """(row, column) of a path such as `requests[3].in`."""
    if field is None or not field.startswith("requests["):
        return None, field
    index, _, rest = field.removeprefix("requests[").partition("]")
    return int(index) + 1, rest.lstrip(".") or None


def _entries(conversation: Conversation, *, keep_nested: bool) -> Iterator[tuple[Place, Entry]]:
    turn = 0
    for row, entry in enumerate(conversation.requests, 1):
        if entry.requests is None:
            yield Place(row, conversation.id, turn, 0), entry
            turn += 1
        elif keep_nested:
            session = f"{conversation.id}/{entry.agent_id or row}"
            start_ns = exact_ns(entry.t, NS_PER_S) or 0
            for nested_turn, nested in enumerate(entry.requests):
                yield Place(row, session, nested_turn, start_ns), nested


def _row(
    intake: Intake, conversation: Conversation, place: Place, entry: Entry, offset: int
) -> tuple[object, ...] | None:
    block = conversation.block_size
    if entry.input is None or entry.out is None:
        intake.bad_row(place.row, "in" if entry.input is None else "out", "is missing")
        return None
    if entry.hash_ids is not None and len(entry.hash_ids) != entry.input // block:
        problem = f"{len(entry.hash_ids)} blocks for {entry.input} tokens, where full blocks of {block} are due"
        intake.bad_row(place.row, "hash_ids", problem)
        return None
    try:
        arrival, think, first, end = (
            exact_ns(value, NS_PER_S) for value in (entry.t, entry.think_time, entry.ttft, entry.api_time)
        )
    except ValueError as error:
        intake.bad_row(place.row, "t", str(error))
        return None
    for column, time_ns in (("t", arrival), ("think_time", think), ("ttft", first), ("api_time", end)):
        if time_ns is not None and time_ns < 0:
            intake.bad_row(place.row, column, "is below 0")
            return None
    assert arrival is not None
    hashes = None if entry.hash_ids is None else [offset + number for number in entry.hash_ids]
    return (
        place.session,
        place.turn,
        think if place.turn else None,
        place.start_ns + arrival,
        entry.model,
        "messages",
        entry.type == "s",
        entry.input,
        entry.out,
        "usage",
        None if hashes is None else block,
        hashes,
        first,
        end,
        entry.stop or None,
    )
