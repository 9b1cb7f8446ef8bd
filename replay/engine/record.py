"""What the engine itself knows of each request, as files: its log, and the ground truth of its waits.

The log has one row a request (JSON lines, written as requests end, or Parquet, written at the engine's end); it is
what a client's or a recorder's own times are compared with. The truth (Parquet) has one row a sequence, with what it
waited for and whom the engine served meanwhile; whoever estimates that from outside must not read it.

Lengths, times and names only; times are CLOCK_MONOTONIC ns of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from traces.errors import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

    from replay.engine.truth import Truth


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own row of a request, the truth for those who measure from outside. Times: CLOCK_MONOTONIC ns.

    Attributes:
        request_id: the client's `X-Request-Id`, else the engine's own.
        tenant: value of the tenant header, else null.
        outcome: `length`, `stop`, `abort` (client gone) or `refused`.
        arrival_ns: the whole request had been read.
        scheduled_ns: first step that gave it a token; null when there was none.
        first_token_ns, last_token_ns: handed to the socket; null when there was none. An answer that is not streamed is
            written at `end_ns`, after its last token.
    """

    request_id: str
    tenant: str | None
    endpoint: str
    stream: bool
    priority: int | None
    n: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    preemptions: int
    outcome: str
    arrival_ns: int
    scheduled_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    end_ns: int


class LogFile(NamedTuple):
    """Where rows of the log go: `write` each, `close` at the end."""

    write: Callable[[Log], None]
    close: Callable[[], None]


def open_log(path: Path) -> LogFile:
    """A log file: Parquet when the name ends so, else JSON lines. Raises TraceError when it cannot be written."""
    try:
        file = path.open("wb", buffering=0)
    except OSError as error:
        raise TraceError(f"--log {path}: {error.strerror}") from None
    if path.suffix != ".parquet":

        def write(row: Log) -> None:
            file.write(msgspec.json.encode(row) + b"\n")

        return LogFile(write, file.close)
    rows: list[Log] = []

    def close() -> None:
        import pyarrow.parquet as pq

        with file:
            pq.write_table(log_table(rows), file)

    return LogFile(rows.append, close)


def log_table(rows: Sequence[Log]) -> pa.Table:
    """The log as a table, with its types whether or not there are rows."""
    import pyarrow as pa

    kinds = {
        "str": pa.string(),
        "str | None": pa.string(),
        "bool": pa.bool_(),
        "int": pa.int64(),
        "int | None": pa.int64(),
    }
    schema = pa.schema([(name, kinds[Log.__annotations__[name]]) for name in Log.__struct_fields__])
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)


def write_truth(truth: Truth, path: Path) -> None:
    """Write the ground truth of a run; column names are those of `truth.RequestTruth`.

    `served_ns` becomes a column for each tenant, `served_ns:NAME`. Raises TraceError when the file cannot be written.
    """
    import pyarrow.parquet as pq

    try:
        pq.write_table(truth_table(truth), path)
    except OSError as error:
        raise TraceError(f"--truth {path}: {error.strerror or error}") from None


def truth_table(truth: Truth) -> pa.Table:
    """The ground truth as a table."""
    import pyarrow as pa

    rows = truth.rows
    columns: dict[str, Any] = {
        "request_id": pa.array([_client_id(row.request) for row in rows], pa.string()),
        "choice": pa.array([row.request.tag.index for row in rows], pa.int32()),
        "tenant": pa.array([row.request.tenant for row in rows], pa.string()),
        "priority": pa.array([row.request.priority for row in rows], pa.int64()),
        "preemptions": pa.array([row.request.preemptions for row in rows], pa.int32()),
    }
    names = [name for name in truth.rows[0]._fields if name not in {"request", "served_ns"}] if rows else []
    for name in names:
        columns[name] = _ns([getattr(row, name) for row in rows])
    for position, tenant in enumerate(truth.tenants):
        served = [row.served_ns[position] if position < len(row.served_ns) else 0.0 for row in rows]
        columns[f"served_ns:{tenant}"] = _ns(served)
    return pa.table(columns)


def _ns(values: Sequence[float | None]) -> pa.Array:
    import pyarrow as pa

    return pa.array([None if value is None else round(value) for value in values], pa.int64())


def _client_id(request: Any) -> str:
    """The id the client gave, as in the log."""
    identity: str = request.tag.answer.id
    return identity.partition("-")[2]
