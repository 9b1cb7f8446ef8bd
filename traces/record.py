"""The request record: one row is one request to an LLM endpoint.

A trace is an Arrow table with the columns below, and everything passes it on: captured or imported, tagged, planned,
sent, and back as an outcome, which is a request record with its measured times. Lengths, times and salted hashes only;
there is no column that could hold text.

Times are int64 nanoseconds. `arrival_ns` is UTC epoch time or time from the trace's start (`Metadata.epoch` says
which); every other `*_ns` of a response is an offset from the moment the request was sent, null when it did not
happen, never 0.

Version 1. A file may hold any subset of the columns that has `arrival_ns`; unknown columns are refused; missing ones
are null. Nothing is inferred from the first rows.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

VERSION = "1"

ENDPOINTS = ("chat", "completions", "responses", "messages", "generate", "embeddings", "rerank", "other")
TOKENS_SOURCES = ("usage", "tokenizer", "chunks", "estimate")
OUTCOMES = (
    "ok",
    "http_error",
    "stream_error",
    "no_token",
    "truncated",
    "client_abort",
    "timeout_connect",
    "timeout_idle",
    "timeout_total",
    "connect_error",
    "cut",
    "unsent",
)
FAILURES = tuple(name for name in OUTCOMES if name not in {"ok", "client_abort", "cut", "unsent"})

_TEXT = pa.string()
_WORD = pa.dictionary(pa.int32(), pa.string())
_COUNT = pa.int32()
_NS = pa.int64()


class Column(NamedTuple):
    """One column: its Arrow type and what it means. `outcome` columns exist only after a replay."""

    name: str
    type: pa.DataType
    meaning: str
    outcome: bool = False


COLUMNS: tuple[Column, ...] = (
    Column("request_id", _TEXT, "our own id, unique in the trace"),
    Column("session_id", _TEXT, "requests of one conversation share it"),
    Column("turn", _COUNT, "position in the session, from 0"),
    Column("think_ns", _NS, "from the former turn's end to this turn's arrival"),
    Column("tenant", _WORD, "who asked"),
    Column("priority", _COUNT, "rank, 0 = most urgent; null = unset"),
    Column("priority_raw", _WORD, "what was on the wire: a number, tier or objective name"),
    Column("arrival_ns", _NS, "when it arrived; in an outcome: when it was sent"),
    Column("model", _WORD, "model name as asked"),
    Column("endpoint", _WORD, "one of ENDPOINTS"),
    Column("stream", pa.bool_(), "answer asked for as a stream"),
    Column("max_tokens", _COUNT, "the request's own limit on output tokens"),
    Column("n", _COUNT, "answers asked for"),
    Column("tools", _COUNT, "tools offered"),
    Column("input_tokens", _COUNT, "prompt length as it happened, chat template included"),
    Column("output_tokens", _COUNT, "output length as it happened, reasoning included"),
    Column("cached_tokens", _COUNT, "prompt tokens the server took from its prefix cache"),
    Column("reasoning_tokens", _COUNT, "output tokens spent on reasoning, as usage says"),
    Column("tokens_source", _WORD, "where the lengths come from: one of TOKENS_SOURCES"),
    Column("block_size", _COUNT, "tokens or characters in a prefix block (unit in the metadata)"),
    Column("block_hashes", pa.list_(pa.int64()), "salted hashes of the prompt's prefix blocks, in order"),
    Column("headers_ns", _NS, "last byte of the response head"),
    Column("first_token_ns", _NS, "first token of any kind, reasoning and tool calls included"),
    Column("first_visible_ns", _NS, "first token that is not reasoning"),
    Column("last_token_ns", _NS, "last token"),
    Column("end_ns", _NS, "end of the response, or when it was given up"),
    Column("chunk_ns", pa.list_(pa.int64()), "every content chunk"),
    Column("chunk_tokens", pa.list_(pa.int32()), "tokens in each content chunk, where the stream tells"),
    Column("queue_ns", _NS, "time in the server's queue, as the server reports it"),
    Column("prefill_ns", _NS, "prefill time, as the server reports it"),
    Column("status", pa.int16(), "HTTP status"),
    Column("outcome", _WORD, "one of OUTCOMES"),
    Column("finish_reason", _WORD, "as the server gave it"),
    Column("error", _TEXT, "class and code of a failure, never the server's text"),
    Column("request_bytes", _NS, "request body size"),
    Column("response_bytes", _NS, "response body size on the wire"),
    Column("planned_input_tokens", _COUNT, "input length asked for", outcome=True),
    Column("planned_output_tokens", _COUNT, "output length asked for", outcome=True),
    Column("due_ns", _NS, "intended send time, from the run's start", outcome=True),
    Column("released_ns", _NS, "when a concurrency cap let it go, from the run's start (else = due)", outcome=True),
    Column("sent_ns", _NS, "when the first attempt began, from the run's start", outcome=True),
    Column("connect_ns", _NS, "time spent connecting; null when a connection was reused", outcome=True),
    Column("attempts", _COUNT, "how often it was sent", outcome=True),
    Column("worker", _COUNT, "sender process", outcome=True),
    Column("arm", _WORD, "arm of an experiment", outcome=True),
    Column("warmup", pa.bool_(), "row of the warm-up, outside the measured window", outcome=True),
)

NAMES = tuple(column.name for column in COLUMNS)
SCHEMA = pa.schema([pa.field(column.name, column.type) for column in COLUMNS])
REQUEST_SCHEMA = pa.schema([pa.field(column.name, column.type) for column in COLUMNS if not column.outcome])


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about all of its rows; stored in the Arrow schema's metadata under `convoy.*`."""

    epoch: str = "relative"  # "unix": arrival_ns is UTC epoch time; "relative": from the trace's start
    block_unit: str = "tokens"  # unit of block_size: "tokens" or "characters"
    source: str = ""  # where the rows come from; a lengths-only file says "lengths" here
    history: tuple[str, ...] = ()  # what was done to the rows, oldest first

    def done(self, step: str) -> Metadata:
        """The same with one more step in its history."""
        return msgspec.structs.replace(self, history=(*self.history, step))

    def encode(self) -> dict[bytes, bytes]:
        """As Arrow schema metadata."""
        values = {
            "version": VERSION,
            "epoch": self.epoch,
            "block_unit": self.block_unit,
            "source": self.source,
            "history": json.dumps(list(self.history)),
        }
        return {f"convoy.{key}".encode(): value.encode() for key, value in values.items()}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes] | None) -> Metadata:
        """From Arrow schema metadata; what is absent takes its default. Raises ValueError for another version."""
        raw = raw or {}
        version = raw.get(b"convoy.version", VERSION.encode()).decode()
        if version != VERSION:
            raise ValueError(f"trace format version {version} (this program reads version {VERSION})")

        def text(key: str, default: str) -> str:
            return raw.get(f"convoy.{key}".encode(), default.encode()).decode()

        return cls(
            epoch=text("epoch", "relative"),
            block_unit=text("block_unit", "tokens"),
            source=text("source", ""),
            history=tuple(json.loads(text("history", "[]"))),
        )


def schema_for(names: tuple[str, ...] | list[str], metadata: Metadata) -> pa.Schema:
    """The schema of a file that holds the columns `names` (record order, known names only)."""
    wanted = set(names)
    return pa.schema([SCHEMA.field(name) for name in NAMES if name in wanted], metadata=metadata.encode())


def table(columns: dict[str, object], metadata: Metadata) -> pa.Table:
    """A trace from arrays or lists by column name, in record order and with the record's types.

    Args:
        columns: name → numpy array, Arrow array or list; all of one length. None values are nulls.
        metadata: what the file says about its rows.

    Raises:
        KeyError: a name that is no column of the record.
    """
    for name in columns:
        SCHEMA.field(name)  # KeyError for a name that is no column
    schema = schema_for(tuple(columns), metadata)
    arrays = [_cast(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def metadata_of(trace: pa.Table | pa.RecordBatch) -> Metadata:
    """The metadata of a trace table."""
    return Metadata.decode(trace.schema.metadata)


def _cast(values: object, type_: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values if values.type == type_ else values.cast(type_)
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        return pa.array(values, type=pa.string()).cast(type_)
    return pa.array(values, type=type_)
